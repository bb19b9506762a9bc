/*
 * Every bound of gradq, with its reason.
 */
#ifndef GRADQ_LIMITS_H
#define GRADQ_LIMITS_H

/* Parameters in a layout: an element index fits 32 bits, and 8 GiB of weights is past one host's
 * memory bandwidth per step anyway. */
#define GQ_PARAMETERS_MAX ((uint64_t)1 << 31)
/* Tensors in a layout: large transformers have a few thousand; the layout must fit one control
 * message. */
#define GQ_TENSORS_MAX 4096
/* Dimensions of one tensor: what PyTorch models use, plus room. */
#define GQ_RANK_MAX 8
/* Bytes of a tensor's name, final NUL included: fits deep state_dict paths. */
#define GQ_NAME_MAX 128
/* Actors known to one run: one 168-byte acknowledgement each a second is 0.7 MB/s. */
#define GQ_ACTORS_MAX 4096
/* Gradients that one actor may have unacknowledged: the width of the acknowledgement map. */
#define GQ_WINDOW_MAX     64
#define GQ_WINDOW_DEFAULT 2
/* One control message (JSON): a layout of GQ_TENSORS_MAX long names fits. */
#define GQ_CONTROL_BYTES_MAX (1024 * 1024)
/* Gradients in the broker's queue, upper bound of --capacity: one pointer-sized slot each. */
#define GQ_QUEUE_CAPACITY_MAX 65536
/* Gradients per step, upper bound of --aggregate. */
#define GQ_AGGREGATE_MAX 65536
/* An endpoint: ZeroMQ binds no ipc path over 107 bytes; tcp names are shorter. */
#define GQ_ENDPOINT_MAX 256
/* State slots and scalars of a plug-in, and its hyperparameters: lion has 1, adam 2; room for
 * AMSGrad-like rules. */
#define GQ_SLOTS_MAX    8
#define GQ_SCALARS_MAX  8
#define GQ_SETTINGS_MAX 32
/* A safetensors header: what the format's reference reader accepts. */
#define GQ_SAFETENSORS_HEADER_MAX (100 * 1000 * 1000)
/* Numbers that a client attaches to its reports. */
#define GQ_METRICS_MAX 16

#endif
