/* The arguments of a call: sizes and pointers, nothing else. `struct` in library.py reads them from this file.
 *
 * All arrays are float32, contiguous, in torch's layout unless a comment says otherwise. `padded` is `hidden` rounded
 * up to whole vectors of the chosen instruction set. A NULL input is absent, a NULL output is not needed. */
#ifndef HOLDFAST_JOB_H
#define HOLDFAST_JOB_H

#include <stddef.h>
#include <stdint.h>

/* One call of a recurrence. */
typedef struct {
    int64_t steps, batch, inputs, hidden;
    int64_t is_lstm;         /* otherwise GRU */
    int64_t detach_at_reset; /* a reset stops gradients and leaves values alone */
    int64_t threads;

    const float *x;                 /* [steps, batch, inputs] */
    const float *h0, *c0;           /* [batch, hidden]; c0 is NULL for GRU */
    const uint8_t *resets;          /* [steps, batch] */
    const float *reset_h, *reset_c; /* [hidden]; NULL means zeros */
    const float *w_ih, *w_hh;       /* [gates * hidden, inputs], [gates * hidden, hidden] */
    const float *b_ih, *b_hh;       /* [gates * hidden] */

    float *y, *h_n, *c_n; /* [steps, batch, hidden], [batch, hidden]; the backward reads y; h_n may be NULL */
    float *gates;         /* [steps, batch, 4, padded]; NULL in a forward without a backward */
    float *cells;         /* [steps, batch, padded], LSTM only, NULL where gates is */

    const float *dy, *dh_n, *dc_n;
    float *dx, *dh0, *dc0, *d_reset_h, *d_reset_c, *dw_ih, *dw_hh, *db_ih, *db_hh;
} Job;

/* One call of a linear recurrence, h[t] = a[t] h[t-1] + b[t]. `width` is `channels`, or twice that for complex numbers: first
 * all real parts, then all imaginary parts. GATED: b holds a gate and a candidate, [steps, batch, 2 * channels], before
 * the gate's sigmoid z; h[t] = h[t-1] + z (candidate - h[t-1]); a and da are NULL. */
typedef enum { REAL, COMPLEX, GATED } LinearForm;
typedef struct {
    int64_t steps, batch, channels, form;
    int64_t a_per_channel;   /* a is [width], otherwise [steps, batch, width] */
    int64_t detach_at_reset; /* a reset stops gradients and leaves values alone */
    int64_t threads;

    const float *a, *b, *h0; /* b [steps, batch, width], h0 [batch, width] */
    const uint8_t *resets;   /* [steps, batch] */
    const float *fill;       /* [width], the state after a reset; NULL means zeros */
    float *h, *h_n;          /* [steps, batch, width], [batch, width]; the backward reads h */

    const float *dh, *dh_n;
    float *da, *db, *dh0, *d_fill; /* shaped as a, b, h0 and fill; all but db may be NULL */
} LinearRecurrence;

/* Linear layers one after another, each with an activation: out[l] = act(in W[l]^T + b[l]). */
#define MAX_LAYERS 8
typedef enum { IDENTITY, TANH, RELU } Activation;
typedef struct {
    int64_t rows, layers, threads;
    int64_t sizes[MAX_LAYERS + 1]; /* of the input, and of each layer's output */
    int64_t activation[MAX_LAYERS];

    const float *x;                             /* [rows, sizes[0]] */
    const float *w[MAX_LAYERS], *b[MAX_LAYERS]; /* [sizes[l + 1], sizes[l]], [sizes[l + 1]] */
    float *out[MAX_LAYERS];                     /* [rows, sizes[l + 1]]; the backward reads all of them */

    const float *d_out; /* of the last layer */
    float *dx;
    float *dw[MAX_LAYERS], *db[MAX_LAYERS];
} Perceptron;

/* PPO's clipped objective for a choice among `actions` (see algorithms/ppo.py), and its gradient. */
typedef struct {
    int64_t rows, actions;
    const float *logits;   /* [rows, actions] */
    const int64_t *chosen; /* [rows], from 0 */
    const float *value, *old_log_prob, *old_value, *advantage, *returns; /* [rows] */
    const uint8_t *valid;  /* [rows]; NULL means all */
    double clip_range, clip_value; /* clip_value < 0: values are not clipped */
    double entropy_coef, value_coef;

    float *d_logits, *d_value; /* of the loss; NaN where the loss is not finite */
    float *terms;              /* loss, policy loss, value loss, entropy, KL, fraction clipped */
} Objective;

/* A step of Adam. */
typedef struct {
    int64_t tensors, step; /* step: the number of this step, from 1 */
    const int64_t *count;  /* [tensors] elements */
    float *const *parameter, *const *mean, *const *square;
    const float *const *gradient;
    double rate, beta1, beta2, eps, max_norm;
    double *norm; /* of all gradients before scaling; if it is not finite, nothing else changes */
    float *const *steps_taken; /* [tensors]: each counts this step; may be NULL */
} Adam;

/* A sum over processes that share memory: how far it has come, and the meetings so far. */
typedef struct {
    int64_t rank, processes;
    int64_t slot;     /* floats in a slot */
    int64_t *arrived; /* [processes, 8], shared: a cache line each; the last meeting of a process, and how many sleep until its next */
    float *slots;     /* [processes + 1, slot], shared: one per process, and the result */
    int64_t meeting;
    int64_t phase; /* 0 between sums */
    float *x;      /* [count]; replaced by the sum */
    int64_t count; /* at most `slot` */
} RankSum;

/* What the functions return. */
enum { DONE, OUT_OF_MEMORY, UNKNOWN_ACTION, INVALID_JOB /* a negative size, or an array that is needed is NULL */ };

/* What one instruction set offers. */
typedef struct {
    const char *name;
    int64_t lanes; /* floats in a vector: `padded` is a multiple of it */
    int (*forward)(const Job *);
    int (*backward)(const Job *);
    int (*linear_forward)(const LinearRecurrence *);
    int (*linear_backward)(const LinearRecurrence *);
    int (*step)(const Job *); /* forward for steps = 1, where h_n is y and nothing is kept */
    int (*perceptron_forward)(const Perceptron *);
    int (*perceptron_backward)(const Perceptron *);
    int (*objective)(const Objective *); /* UNKNOWN_ACTION for an action out of range */
    int (*adam)(const Adam *);
} Isa;

/* Scratch memory, aligned to a cache line; memory is NULL when none is left. Each thread keeps a block per purpose for its
 * next call, since fresh memory costs a page fault per 4 KiB. */
typedef struct {
    void *memory;
    size_t bytes;
} Block;
typedef enum { SHARED_BY_PARTS, OF_ONE_PART, PURPOSES } Purpose;
Block holdfast_borrow(Purpose purpose, size_t bytes);
void holdfast_give_back(Purpose purpose, Block block);

/* Runs work(context, part) for part in [0, parts), on as many threads. */
void holdfast_parallel(void (*work)(void *, int64_t), void *context, int64_t parts);

#endif
