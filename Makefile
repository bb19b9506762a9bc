# gradq.  `make help` lists the targets; `make run` and `make test` install what they need first.
#
#   V=1                        show the commands
#   PARTS='unit programs process'  which tests test, asan and tsan run
#   SANITIZE=address|thread    build into build/<name> with that sanitizer (asan and tsan do it)
#   CFLAGS='-O3 -g'            optimisation and debugging; the rest is below
#   PREFIX= DESTDIR=           where `make install` puts things
#   ARGS=                      more words for the program that run, pong or bench starts
#   FUZZ_SECONDS=              time for each fuzzer
#   SIM_SEEDS=1..100000        which schedules the simulator runs
#   CHAOS_SEEDS= CHAOS_SECONDS=   how many runs of the chaos runner, and how long each is disturbed

PREFIX       ?= /usr/local
DESTDIR      ?=
CC           := gcc
CFLAGS       ?= -O3 -g
WERROR       := -Werror
SANITIZE     ?=
FUZZ_SECONDS ?= 600
SIM_SEEDS    ?= 1..100000
CHAOS_SEEDS  ?= 20
CHAOS_SECONDS ?= 20

BUILD := build$(if $(SANITIZE),/$(SANITIZE))
Q     := $(if $(V),,@)
# All cores, unless make was told how many.  Not :=, for MAKEFLAGS is only complete in a recipe.
JOBS   = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))

# How our C is compiled.  The same float32 bits on every CPU level: no contraction to fused
# multiply-add, and -ffast-math nowhere.  errno and traps of the maths library are never looked at.
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wconversion $(WERROR)
FLOATS   := -ffp-contract=off -fno-math-errno -fno-trapping-math
INCLUDES := -Iinclude -Isrc -I.
C_FLAGS  := -std=c11 -D_GNU_SOURCE -pthread -fPIC -fvisibility=hidden \
            $(CFLAGS) $(FLOATS) $(WARNINGS)
LD_FLAGS := $(LDFLAGS)
# By name: pkg-config's libczmq drags in all that czmq's own static build could use.
LIBS     := -lczmq -lzmq -ljansson -lisal -linih -lxxhash -ldl -lm -pthread
# Those of them that a client needs, for whoever links libgradq.a.
CLIENT_LIBS := -lzmq -ljansson -lisal -lxxhash -lm -pthread
# Only actors need a BLAS, and giflib for --record; the broker and the optimizer load neither.
BLAS     := -lopenblas
GIF      := -lgif

ifeq ($(SANITIZE),address)
SANITIZER := -fsanitize=address,undefined -fno-sanitize-recover=undefined
else ifneq ($(SANITIZE),)
SANITIZER := -fsanitize=$(SANITIZE)
endif
ifneq ($(SANITIZE),)
# After CFLAGS, so that these win: stacks in reports need frame pointers and little inlining.
C_FLAGS  += -O1 -g -fno-omit-frame-pointer $(SANITIZER)
LD_FLAGS += $(SANITIZER)
endif

# ---- what there is ----
objects = $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard $1))

LIB_OBJ       := $(call objects,src/*.c)
BROKER_OBJ    := $(call objects,broker/*.c)
OPTIMIZER_OBJ := $(call objects,optimizer/*.c)
ACTOR_OBJ     := $(call objects,actors/*.c)
# The disk that tests write to is not a test itself.
TEST_OBJ      := $(call objects,tests/test_*.c) $(BUILD)/obj/tests/memory_disk.o
# Tests see the parts of a program, not its main.
PARTS_OBJ     := $(filter-out %/main.o,$(BROKER_OBJ) $(OPTIMIZER_OBJ) $(ACTOR_OBJ))

LIB           := $(BUILD)/libgradq.a
# The client alone; it exports what include/gradq declares.  gradq.h is the home of the version.
VERSION       := $(shell sed -n 's/^.define GQ_VERSION_STRING "\(.*\)"/\1/p' include/gradq/gradq.h)
SHARED        := $(BUILD)/libgradq.so.$(VERSION)
SONAME        := libgradq.so.$(firstword $(subst ., ,$(VERSION)))
PROGRAMS      := $(BUILD)/gradq-broker $(BUILD)/gradq-optimizer $(BUILD)/gradq-actor \
                 $(patsubst tools/%.c,$(BUILD)/%,$(wildcard tools/gradq-*.c))
SCRIPTS       := $(wildcard tools/gradq tools/gradq_*.py)
PLUGINS       := $(patsubst optimizer/%.c,$(BUILD)/%.so,$(wildcard optimizer/plugins/*.c))
TEST_PLUGINS  := $(patsubst %.c,$(BUILD)/%.so,$(wildcard tests/plugins/*.c))
TEST_PROGRAMS := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/main_*.c))
# The simulator brings its own checkpoint files and crash points.
SIM_OBJ       := $(call objects,tests/main_sim.c tests/sim/*.c tests/memory_disk.c)
CHAOS_CLIENT  := $(BUILD)/tests/chaos_client
FAULTS        := $(BUILD)/tests/faults_shim.so
FUZZERS       := $(patsubst tests/%.c,build/fuzz/%,$(wildcard tests/fuzz_*.c))

# ---- what to do ----
.DEFAULT_GOAL := all
.PHONY: help all run pong test sim mutants bench bench-torch bench-python asan tsan fuzz chaos lint format options venv
.PHONY: install uninstall clean
.PHONY: check tests FORCE

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12
	@sed -n '/^#   /s/^# //p' Makefile

all: $(PROGRAMS) $(PLUGINS) $(LIB) $(SHARED) ## build every program, plug-in and the library into build/

run: ## install what is missing, build, train 4 actors to solve CartPole under the supervisor
	@tools/setup.sh run
	@$(MAKE) --no-print-directory $(JOBS) all
	@tools/gradq up --run run --env CartPole-v1 --actors 4 --target-return 475 $(ARGS)

pong: ## the same with Atari's Pong from pixels: 3 actors of 4 games, about 20 minutes on two cores
	@tools/setup.sh run venv
	@$(MAKE) --no-print-directory $(JOBS) all
	@tools/gradq up --run run-pong --env gym:ALE/Pong-v5 --env-set repeat_action_probability=0 \
	    --net conv-lstm --actors 3 --target-return 18 $(ARGS)

test: ## install what is missing, build, run every test
	@tools/setup.sh test
	@$(MAKE) --no-print-directory check

asan: ## every test with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
	@tools/setup.sh test
	@$(MAKE) --no-print-directory SANITIZE=address check

tsan: ## thread and process tests with ThreadSanitizer
	@tools/setup.sh test
	@$(MAKE) --no-print-directory SANITIZE=thread check

sim: ## 100,000 simulated schedules of faults on the real code, in one thread (SIM_SEEDS=A..B)
	@tools/setup.sh test
	@$(MAKE) --no-print-directory $(JOBS) $(BUILD)/tests/main_sim $(BUILD)/plugins/sgd.so
	@$(BUILD)/tests/main_sim --seeds $(SIM_SEEDS)

mutants: ## break exactly-once in three ways, and see that the simulator notices each
	@tools/setup.sh test
	@/usr/bin/python3 tests/sim/mutants.py

bench: ## measure rates, beside the limits of this machine in the same run
	@tools/setup.sh run
	@$(MAKE) --no-print-directory $(JOBS) all
	@$(BUILD)/gradq-bench $(ARGS)

bench-torch: ## the pixel net beside the same one in PyTorch, agent steps/s on one core
	@tools/setup.sh run torch
	@$(MAKE) --no-print-directory $(JOBS) all
	@/usr/bin/python3 tools/bench_torch.py --build $(CURDIR)/$(BUILD) $(ARGS)

bench-python: ## training steps/s of actors in Python, beside the C client and a local optimizer
	@tools/setup.sh run torch
	@$(MAKE) --no-print-directory $(JOBS) all
	@/usr/bin/python3 tools/bench_python.py --build $(CURDIR)/$(BUILD) $(ARGS)

fuzz: ## FUZZ_SECONDS of libFuzzer on each decoder
	@tools/setup.sh fuzz
	@$(MAKE) --no-print-directory $(JOBS) $(FUZZERS)
	@tools/fuzz.sh $(FUZZ_SECONDS) $(FUZZERS)

chaos: ## kill, stop and cut everything: nothing is lost, doubled or torn, and learning goes on
	@tools/setup.sh test
	@$(MAKE) --no-print-directory $(JOBS) all $(CHAOS_CLIENT)
	@/usr/bin/python3 tests/chaos/chaos.py --build $(CURDIR)/$(BUILD) --seeds $(CHAOS_SEEDS) \
	    --seconds $(CHAOS_SECONDS) $(ARGS)
	@/usr/bin/python3 tests/chaos/learning.py --build $(CURDIR)/$(BUILD) --rounds 3
	@test ! -x build/venv/bin/python || /usr/bin/python3 tests/chaos/learning.py --every 1 \
	    --build $(CURDIR)/$(BUILD) --env gym:CartPole-v1 --actors 2

lint: ## layout, static analysis, and the house rules that a program can check
	@tools/setup.sh run lint
	@$(MAKE) --no-print-directory $(JOBS) all
	@/usr/bin/python3 tools/lint.py

format: ## let clang-format lay out all C
	@tools/setup.sh lint
	clang-format-14 -i $$(find include src broker optimizer actors tools tests -name '*.[ch]')

options: all ## write docs/OPTIONS.md from what the programs say to --help
	@/usr/bin/python3 tools/options.py

venv: ## Python with Gymnasium, TensorBoard and matplotlib in build/venv, for gym:ID and curves
	@tools/setup.sh venv
	@echo "build/venv is ready; gradq-actor and tools/gradq find it by themselves"

clean: ## remove build/
	rm -rf build

# The tests of one build: all of them, or without a sanitizer that cannot run Criterion.
check:
	@$(MAKE) --no-print-directory $(JOBS) tests
	@/usr/bin/python3 tests/run.py $(CURDIR)/$(BUILD) $(PARTS)
tests: all $(TEST_PLUGINS) $(TEST_PROGRAMS) $(CHAOS_CLIENT) $(FAULTS) \
       $(if $(filter thread,$(SANITIZE)),,$(BUILD)/tests/unit)

# Programs look for their plug-ins beside themselves, so they lie together; bin/ has links.
to        := $(DESTDIR)$(PREFIX)
commands  := gradq $(notdir $(PROGRAMS))
links     := libgradq.so $(SONAME)
manuals   := $(commands:%=man1/%.1) man3/gradq.3 man7/gradq.7
installed := $(commands:%=bin/%) $(links:%=lib/%) \
             $(addprefix lib/gradq/,$(notdir $(PROGRAMS) $(SCRIPTS))) \
             $(PLUGINS:$(BUILD)/%=lib/gradq/%) $(wildcard include/gradq/*.h) \
             $(addprefix lib/,$(notdir $(LIB) $(SHARED)) pkgconfig/gradq.pc) \
             $(manuals:%=share/man/%) $(commands:%=share/bash-completion/completions/%)
install: all $(BUILD)/share/bash-completion ## install below PREFIX (DESTDIR is put before it)
	install -d $(sort $(dir $(installed:%=$(to)/%)))
	install -m 755 $(PROGRAMS) $(SCRIPTS) $(to)/lib/gradq
	install -m 755 $(PLUGINS) $(to)/lib/gradq/plugins
	install -m 644 $(LIB) $(SHARED) $(to)/lib
	install -m 644 include/gradq/*.h $(to)/include/gradq
	ln -sf $(commands:%=../lib/gradq/%) $(to)/bin
	for name in $(links); do ln -sf $(notdir $(SHARED)) $(to)/lib/$$name; done
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@LIBS@|$(CLIENT_LIBS)|' \
	    tools/gradq.pc.in >$(to)/lib/pkgconfig/gradq.pc
	for page in $(manuals); do \
	    install -m 644 $(BUILD)/share/man/$$page $(to)/share/man/$$page || exit; done
	install -m 644 $(BUILD)/share/bash-completion $(to)/share/bash-completion/completions/gradq
	for name in $(filter-out gradq,$(commands)); do \
	    ln -sf gradq $(to)/share/bash-completion/completions/$$name; done

uninstall: ## remove what `make install` put there, with the same PREFIX and DESTDIR
	rm -f $(installed:%=$(to)/%)
	rm -rf $(to)/lib/gradq/__pycache__
	for folder in lib/gradq/plugins lib/gradq include/gradq; do \
	    test ! -d $(to)/$$folder || rmdir --ignore-fail-on-non-empty $(to)/$$folder; done

# ---- how it is made ----
# Holds the flags of the last build; everything is made again when they change.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(C_FLAGS) $(LD_FLAGS) $(LIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(C_FLAGS) $(LD_FLAGS) $(LIBS)' >$@

COMPILE = $(CC) $(INCLUDES) $(C_FLAGS) -MMD -MP -MF $(BUILD)/obj/$(<:.c=.d)
LINK    = $(CC) $(C_FLAGS) -rdynamic $(LD_FLAGS) -o $@ $(filter %.o %.a,$^)

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(COMPILE) -c -o $@ $<

# The actor carries this script inside itself; see actors/gym.c.
$(BUILD)/obj/actors/gym.o: actors/python/gym_bridge.py

$(LIB): $(LIB_OBJ)
	@echo "  ar    $@"
	$(Q)rm -f $@ && ar rcs $@ $^

# Of the rest of src/ it takes what the client calls.
$(SHARED): $(call objects,src/client*.c src/status.c) $(LIB)
	@echo "  link  $@"
	$(Q)$(CC) $(C_FLAGS) $(LD_FLAGS) -shared -Wl,-soname,$(SONAME) -o $@ $(filter %.o %.a,$^) \
	    $(CLIENT_LIBS)

# Manual pages, written beside it, and completion: what the programs say to --help.
$(BUILD)/share/bash-completion: tools/manual.py docs/gradq.7 include/gradq/gradq.h $(PROGRAMS) \
                                $(SCRIPTS)
	@echo "  pages $(@D)"
	$(Q)/usr/bin/python3 tools/manual.py $(BUILD) $(@D)

$(BUILD)/gradq-broker: $(BROKER_OBJ) $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)
$(BUILD)/gradq-optimizer: $(OPTIMIZER_OBJ) $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)
$(BUILD)/gradq-actor: $(ACTOR_OBJ) $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(BLAS) $(GIF) $(LIBS)
# It replays with the optimizer's own parts.
$(BUILD)/gradq-replay: $(BUILD)/obj/tools/gradq-replay.o $(filter-out %/main.o,$(OPTIMIZER_OBJ)) $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)
# Only the exporter serves HTTP.
$(BUILD)/gradq-exporter: $(BUILD)/obj/tools/gradq-exporter.o $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS) -lmicrohttpd
$(BUILD)/gradq-%: $(BUILD)/obj/tools/gradq-%.o $(LIB)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)

# A plug-in is one file and a shared object: the command here is the one that docs/PLUGINS.md gives.
$(BUILD)/plugins/%.so: optimizer/plugins/%.c $(BUILD)/flags
	@mkdir -p $(@D) $(BUILD)/obj/$(<D)
	@echo "  cc    $@"
	$(Q)$(COMPILE) $(LD_FLAGS) -shared -o $@ $< -lm

# Plug-ins with something wrong, for tests.  fast_math is what a user's careless flags make: linked
# so, gcc adds a constructor that sets flush-to-zero for the whole process.
$(BUILD)/tests/plugins/%.so: tests/plugins/%.c $(BUILD)/flags
	@mkdir -p $(@D) $(BUILD)/obj/$(<D)
	@echo "  cc    $@"
	$(Q)$(COMPILE) $(LD_FLAGS) $(PLUGIN_FLAGS) -shared -o $@ $< -lm
$(BUILD)/tests/plugins/fast%.so: PLUGIN_FLAGS := -ffast-math

# Running the unit tests takes the programs and plug-ins too; `tests` makes them, this only links.
$(BUILD)/tests/unit: $(TEST_OBJ) $(PARTS_OBJ) $(LIB)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(LINK) -lcriterion $(BLAS) $(GIF) $(LIBS)
$(BUILD)/tests/main_sim: $(SIM_OBJ) $(filter-out %/main.o $(BUILD)/obj/optimizer/checkpoint%, \
                         $(BROKER_OBJ) $(OPTIMIZER_OBJ)) $(LIB)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)
$(BUILD)/tests/main_%: $(BUILD)/obj/tests/main_%.o $(PARTS_OBJ) $(LIB)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(LINK) $(BLAS) $(GIF) $(LIBS)

# Looks below gradq.h, see there; tests/run.py does not start it by itself.
$(CHAOS_CLIENT): $(BUILD)/obj/tests/chaos/client.o $(LIB)
	@mkdir -p $(@D)
	@echo "  link  $@"
	$(Q)$(LINK) $(LIBS)

# Stands in front of libc (LD_PRELOAD), for tests/process/test_faults.py.
$(FAULTS): tests/faults/shim.c $(BUILD)/flags
	@mkdir -p $(@D) $(BUILD)/obj/$(<D)
	@echo "  cc    $@"
	$(Q)$(COMPILE) $(LD_FLAGS) -shared -o $@ $< -ldl

# libFuzzer comes with clang.  A fuzzer is compiled whole, its target and all of src/ instrumented.
build/fuzz/fuzz_journal: optimizer/journal.c optimizer/journal_read.c tests/memory_disk.c
# The life of a checkpoint names its rule, which is loaded as ever.
build/fuzz/fuzz_checkpoint: $(wildcard optimizer/checkpoint*.c optimizer/*_json.c) \
    $(wildcard optimizer/core*.c) \
    $(addprefix optimizer/,buffers.c journal.c journal_read.c lanes.c ledger.c life.c live.c) \
    build/plugins/adam.so build/plugins/sgd.so
build/fuzz/%: tests/%.c $(wildcard src/*.[ch] include/gradq/*.h tests/*.h)
	@mkdir -p $(@D)
	@echo "  clang $@"
	$(Q)clang-14 $(INCLUDES) -std=c11 -D_GNU_SOURCE -pthread -O1 -g $(FLOATS) \
	    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
	    -o $@ $(filter %.c,$^) $(LIBS)

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
.SECONDARY:
.DELETE_ON_ERROR:
