/*
 * The one table of options: the only home of each name, default, bound, unit and help text.
 */
#include "crew.h"
#include "options.h"

#include "gradq/limits.h"

#define BROKER    GQ_PROGRAM_BROKER
#define OPTIMIZER GQ_PROGRAM_OPTIMIZER
#define ACTOR     GQ_PROGRAM_ACTOR
#define TOP       GQ_PROGRAM_TOP
#define TRY       GQ_PROGRAM_TRY
#define BENCH     GQ_PROGRAM_BENCH
#define REPLAY    GQ_PROGRAM_REPLAY
#define EXPORTER  GQ_PROGRAM_EXPORTER
#define SERVICES  (BROKER | OPTIMIZER | ACTOR)
#define NO_BOUND  UINT64_MAX

/* clang-format off */
#define TEXT(name, programs, fallback, unit, help)                 {name, programs, GQ_OPTION_TEXT, fallback, 0, 0, NULL, unit, help}
#define CHOICE(name, programs, fallback, choices, help)            {name, programs, GQ_OPTION_CHOICE, fallback, 0, 0, choices, NULL, help}
#define COUNT(name, programs, fallback, min, max, unit, help)      {name, programs, GQ_OPTION_COUNT, fallback, (double) (min), (double) (max), NULL, unit, help}
#define NUMBER(name, programs, fallback, min, max, unit, help)     {name, programs, GQ_OPTION_NUMBER, fallback, min, max, NULL, unit, help}
#define BYTES(name, programs, fallback, min, max, help)            {name, programs, GQ_OPTION_BYTES, fallback, (double) (min), (double) (max), NULL, "BYTES", help}
#define FLAG(name, programs, help)                                 {name, programs, GQ_OPTION_FLAG, "0", 0, 0, NULL, NULL, help}
#define LIST(name, programs, unit, help)                           LIST_OF (name, programs, NULL, unit, help)
#define LIST_OF(name, programs, fallback, unit, help)              {name, programs, GQ_OPTION_LIST, fallback, 0, 0, NULL, unit, help}

const gq_option_row gq_option_table[] = {
    /* everywhere */
    TEXT ("address", SERVICES | TOP | EXPORTER, "tcp://127.0.0.1:5600", "ENDPOINT", "the broker's control socket, tcp://HOST:PORT or ipc://PATH; the other sockets follow from it"),
    CHOICE ("log-level", SERVICES | BENCH, "info", "debug|info|warning|error", "least level that is logged"),
    TEXT ("log-file", SERVICES, NULL, "FILE", "append the JSON-lines log to this file instead of stderr"),

    /* broker */
    COUNT ("capacity", BROKER, "256", 1, GQ_QUEUE_CAPACITY_MAX, "gradients", "gradients the queue holds before actors wait"),
    BYTES ("queue-bytes", BROKER, "256M", 4096, 1e15, "bytes the queue holds before actors wait; also the largest frame that is accepted"),

    /* update rule */
    TEXT ("optimizer", OPTIMIZER | TRY | BENCH, "adam", "NAME|FILE.so", "update rule: adam, adamw, rmsprop, adagrad, sgd, lion, or your plug-in"),
    LIST ("set", OPTIMIZER | TRY | BENCH, "KEY=VALUE", "hyperparameter of the rule or of the host (clip_norm, schedule, schedule_steps, warmup_steps)"),
    TEXT ("plugins", OPTIMIZER | TRY | BENCH | REPLAY, NULL, "DIR", "where shipped plug-ins lie; default: the directory plugins beside the program"),
    CHOICE ("cpu", OPTIMIZER | TRY | BENCH | REPLAY, "auto", "auto|sse2|avx2|avx512", "instruction set of the kernels; every choice gives the same bits"),

    /* optimizer */
    COUNT ("threads", OPTIMIZER | BENCH, "1", 1, GQ_CREW_MAX, "threads", "threads that share each step of a large model (65,536 parameters and more); the same bits, and its slots take twice the memory"),
    COUNT ("aggregate", OPTIMIZER, "1", 1, GQ_AGGREGATE_MAX, "gradients", "apply the mean of this many gradients as one step"),
    CHOICE ("aggregate-weights", OPTIMIZER, "equal", "equal|samples", "weight gradients equally in that mean, or by their sample count"),
    COUNT ("max-staleness", OPTIMIZER, "inf", 0, NO_BOUND, "steps", "gradients computed from weights older than this are stale"),
    CHOICE ("staleness-policy", OPTIMIZER, "refuse", "refuse|damp", "refuse stale gradients, or damp: scale each by min(1, mean staleness / its staleness) and refuse none"),
    NUMBER ("publish-interval-ms", OPTIMIZER, "0", 0, 60000, "ms", "least time between two published versions; the newest always gets out in the end"),
    TEXT ("run", OPTIMIZER | TOP | REPLAY | EXPORTER, NULL, "DIR", "run directory: checkpoints, term and lock live here (gradq-top, gradq-exporter: take the address from it)"),
    TEXT ("init", OPTIMIZER, NULL, "FILE", "safetensors file with the first weights; its tensors become the layout"),
    FLAG ("resume", OPTIMIZER, "go on from the newest checkpoint of the run directory, if there is one"),
    NUMBER ("checkpoint-interval-s", OPTIMIZER, "10", 0, 86400, "s", "time between checkpoints; 0: only at a clean stop and on SIGUSR1"),
    CHOICE ("journal", OPTIMIZER, "recycle", "recycle|keep|off", "journal of every decision: delete segments that checkpoints cover, and by default only name gradients; keep all of them, with the gradients; or write none (a crash then goes back to the last checkpoint)"),
    CHOICE ("fsync", OPTIMIZER, "never", "never|interval|always", "what the journal survives: the death of every process; also a loss of power but for the last moments; or that without exception"),
    NUMBER ("fsync-interval-ms", OPTIMIZER, "100", 1, 60000, "ms", "time between two syncs of the journal with --fsync interval"),
    CHOICE ("lane", OPTIMIZER, "auto", "auto|inline|shm", "auto, or shm as actors call it: offer memory shared with this process to actors of this host, and sockets to all others; inline: sockets to all"),
    COUNT ("checkpoints-kept", OPTIMIZER, "2", 1, 1000, "files", "older checkpoints are deleted"),

    /* actor: service */
    COUNT ("actor", ACTOR, "inf", 0, NO_BOUND, "ID", "identity in the run, below 4096; inf: be given a free one"),
    COUNT ("window", ACTOR, "2", 1, GQ_WINDOW_MAX, "gradients", "gradients an actor may have unacknowledged"),
    CHOICE ("lane", ACTOR, "auto", "auto|inline|shm", "how gradients and weights travel: inline, through sockets; shm, through memory shared with the optimizer, on its host and where it offers it; auto, shm where it can be had"),
    CHOICE ("encoding", ACTOR | BENCH, "f32", "f32|bf16", "how gradients travel on lane inline: f32, or bf16, rounded to half the bytes; lane shm is f32 always"),
    COUNT ("timeout-ms", ACTOR, "30000", 1, 2147483647, "ms", "longest wait for the broker, the optimizer or the queue before the actor gives up"),

    /* actor: learning */
    TEXT ("env", ACTOR, "CartPole-v1", "NAME", "environment: CartPole-v1 or Pong (built in), or gym:ID for any Gymnasium environment"),
    LIST ("env-set", ACTOR, "KEY=VALUE", "setting of Pong, or keyword argument of the Gymnasium environment"),
    TEXT ("python", ACTOR, NULL, "FILE", "Python interpreter for gym:ID; default: GRADQ_PYTHON, then build/venv, then python3"),
    CHOICE ("net", ACTOR, "dense", "dense|conv-lstm", "network: dense (two tanh layers, separate policy and value nets) or conv-lstm (pixels)"),
    COUNT ("hidden", ACTOR, "64", 1, 4096, "units", "width of the dense layers"),
    COUNT ("envs-per-actor", ACTOR, "1", 1, 256, "N", "games that this actor plays side by side; a gradient is the mean over them"),
    COUNT ("seed", ACTOR, "1", 0, NO_BOUND, "N", "seed of weights, environment and actions; actor k of a run uses its own stream of it"),
    COUNT ("rollout", ACTOR, "20", 1, 4096, "steps", "environment steps per gradient (n of the n-step return)"),
    NUMBER ("gamma", ACTOR, "0.99", 0, 1, NULL, "discount"),
    NUMBER ("lambda", ACTOR, "1", 0, 1, NULL, "GAE(lambda); 1: plain n-step advantages"),
    NUMBER ("entropy-weight", ACTOR, "0", 0, 10, NULL, "weight of the entropy bonus"),
    NUMBER ("value-weight", ACTOR, "0.5", 0, 10, NULL, "weight of the value loss 0.5 (V - R)^2"),
    CHOICE ("reduction", ACTOR, "mean", "mean|sum", "how the loss of a rollout is reduced over its steps"),
    CHOICE ("normalise", ACTOR, "none", "none|running", "observations: as they are, or brought to mean 0 and deviation 1 by running means of both over each game"),
    NUMBER ("reward-clip", ACTOR, "0", 0, 1e9, NULL, "learn rewards within +- this; 0: as they are. Returns are shown unclipped"),
    COUNT ("max-steps", ACTOR, "inf", 1, NO_BOUND, "steps", "stop after this many environment steps of this actor"),
    TEXT ("metrics", ACTOR, NULL, "FILE", "append a JSON line per finished episode, and one a second about learning"),

    /* actor: other jobs */
    NUMBER ("benchmark", ACTOR, NULL, 0.01, 3600, "seconds", "measure agent steps a second of the net alone, of the games alone and of both, each for so long, and exit"),
    FLAG ("gradients", ACTOR, "compute loss and gradients of the rollout in --in, write them to --out, and exit"),
    TEXT ("evaluate", ACTOR, NULL, "FILE", "play --episodes with the weights in this safetensors file, and exit"),
    TEXT ("record", ACTOR, NULL, "FILE", "write the first evaluated episode to this animated GIF, a picture a step, 15 a second"),
    COUNT ("episodes", ACTOR, "10", 1, 1000000, "episodes", "episodes to evaluate"),
    FLAG ("greedy", ACTOR, "evaluate with the most probable action instead of sampling"),
    FLAG ("json", ACTOR | TOP | BENCH, "print JSON, one object a line"),
    TEXT ("in", ACTOR | TRY, NULL, "FILE", "safetensors file to read"),
    TEXT ("out", ACTOR | TRY | REPLAY, NULL, "FILE", "safetensors file to write"),

    /* gradq-try */
    LIST ("at", TRY, "K", "write weights and slots after step K; default: after the last"),

    /* gradq-replay */
    COUNT ("until", REPLAY, "inf", 0, NO_BOUND, "VERSION", "reproduce this version; inf: the last one"),
    FLAG ("verify", REPLAY, "replay from each retained checkpoint to the next and compare, bit for bit"),
    FLAG ("cut", REPLAY, "when the journal is damaged, or names gradients that are gone, cut it behind its last good record"),

    /* gradq-top */
    FLAG ("once", TOP, "print one report and exit; without --json it comes after two looks, --interval-ms apart, for the rates"),
    FLAG ("stat", TOP, "print a row each interval, as vmstat does"),
    COUNT ("fail-above", TOP, "inf", 0, NO_BOUND, "gradients", "exit 1 as soon as the depth exceeds this"),
    COUNT ("interval-ms", TOP | EXPORTER, "1000", 50, 3600000, "ms", "time between two looks at the broker"),
    COUNT ("wait-ms", TOP, "2000", 1, 3600000, "ms", "longest wait for the broker's answer"),

    /* gradq-exporter */
    TEXT ("listen", EXPORTER, "127.0.0.1:5610", "HOST:PORT", "where HTTP is served, without a password: this host alone unless told otherwise; [HOST]:PORT for IPv6; port 0: any free one, which is printed"),

    /* gradq-bench: a row of figures for each combination of the lists */
    LIST_OF ("params", BENCH, "1000;10000;100000;1000000;10000000", "N", "elements of the vector"),
    LIST_OF ("actors", BENCH, "1;4", "N", "how many actors push, 1 to 256"),
    LIST_OF ("lane", BENCH, "inline;shm", "LANE", "how gradients travel: inline, shm, or auto for what the client chooses; one that is not to be had is reported, and the rest goes on"),
    LIST_OF ("window", BENCH, "2", "N", "gradients an actor may have unacknowledged, 1 to 64"),
    LIST_OF ("journal", BENCH, "recycle", "MODE", "journal of the optimizer, recycle, keep or off; off is measured beside the others in any case"),
    CHOICE ("transport", BENCH, "ipc", "ipc|tcp", "what broker and raw ZeroMQ sockets are bound to; tcp: 127.0.0.1"),
    NUMBER ("seconds", BENCH, "2", 0.05, 3600, "s", "time of each measurement"),

    {.name = NULL}};
/* clang-format on */
