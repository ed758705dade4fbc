/* The functions Python calls, the choice of an instruction set, and the scratch memory that threads keep. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "job.h"

#define EXPORT __attribute__((visibility("default")))

extern const Isa holdfast_plain;
#if defined(__x86_64__)
extern const Isa holdfast_avx2, holdfast_avx512;
#endif

static const Isa *chosen = &holdfast_plain;

/* Chooses "avx512", "avx2" or "plain", or with "" the best this CPU runs. Returns the name chosen, or NULL when this
 * CPU does not have it (the choice is unchanged then). Must not be called while a recurrence runs. */
EXPORT const char *holdfast_choose(const char *name) {
    const Isa *best = NULL;
    int any = name[0] == 0;
    if (any || !strcmp(name, "plain")) best = &holdfast_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if ((any || !strcmp(name, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        best = &holdfast_avx2;
    if ((any || !strcmp(name, "avx512")) && __builtin_cpu_supports("avx512f")) best = &holdfast_avx512;
#endif
    if (!best) return NULL;
    chosen = best;
    return chosen->name;
}

/* Identifies the sources this library was built from: build.key(). */
#if !defined(HOLDFAST_KEY)
#define HOLDFAST_KEY ""
#endif
EXPORT const char *holdfast_key(void) { return HOLDFAST_KEY; }

EXPORT int64_t holdfast_lanes(void) { return chosen->lanes; }

/* Sizes of arrays cannot be checked here, the rest is: a wrong call is refused instead of following a NULL. An array
 * without elements may be NULL. */
static int is_recurrence(const Job *job) {
    if (job->steps < 0 || job->batch < 0 || job->inputs < 0 || job->hidden < 1 || job->threads < 1) return 0;
    const int64_t rows = job->steps * job->batch;
    return (job->x || !rows || !job->inputs) && (job->h0 || !job->batch) && (job->w_ih || !job->inputs) && job->w_hh &&
           (job->y || !rows) && (!job->is_lstm || job->c0 || !job->batch);
}
EXPORT int holdfast_forward(const Job *job) {
    if (!is_recurrence(job)) return INVALID_JOB;
    const int lstm_is_whole = !job->is_lstm || ((job->c_n || !job->batch) && !job->cells == !job->gates);
    return lstm_is_whole ? chosen->forward(job) : INVALID_JOB;
}
EXPORT int holdfast_backward(const Job *job) {
    if (!is_recurrence(job)) return INVALID_JOB;
    const int kept = job->gates && (!job->is_lstm || job->cells);
    return kept || !job->steps || !job->batch ? chosen->backward(job) : INVALID_JOB;
}
EXPORT int holdfast_step(const Job *job) {
    if (!is_recurrence(job) || job->steps != 1) return INVALID_JOB;
    return !job->is_lstm || job->c_n || !job->batch ? chosen->step(job) : INVALID_JOB;
}

static int is_linear_recurrence(const LinearRecurrence *job) {
    if (job->steps < 0 || job->batch < 0 || job->channels < 1 || job->threads < 1) return 0;
    if (job->form < REAL || job->form > GATED) return 0;
    const int64_t rows = job->steps * job->batch;
    return (job->a || job->form == GATED || !rows) && (job->b || !rows) && (job->h0 || !job->batch) && (job->h || !rows);
}
EXPORT int holdfast_linear_forward(const LinearRecurrence *job) {
    return is_linear_recurrence(job) && (job->h_n || !job->batch) ? chosen->linear_forward(job) : INVALID_JOB;
}
EXPORT int holdfast_linear_backward(const LinearRecurrence *job) {
    const int rows = job->steps && job->batch;
    return is_linear_recurrence(job) && (job->db || !rows) ? chosen->linear_backward(job) : INVALID_JOB;
}

static int is_perceptron(const Perceptron *job) {
    if (job->rows < 0 || job->layers < 1 || job->layers > MAX_LAYERS || job->threads < 1) return 0;
    if (!job->x && job->rows && job->sizes[0]) return 0;
    for (int64_t l = 0; l < job->layers; l++) {
        if (job->sizes[l] < 0 || job->sizes[l + 1] < 1 || !job->b[l] || (!job->w[l] && job->sizes[l])) return 0;
        if ((!job->out[l] && job->rows) || job->activation[l] < IDENTITY || job->activation[l] > RELU) return 0;
    }
    return 1;
}
EXPORT int holdfast_perceptron_forward(const Perceptron *job) {
    return is_perceptron(job) ? chosen->perceptron_forward(job) : INVALID_JOB;
}
EXPORT int holdfast_perceptron_backward(const Perceptron *job) {
    int valid = is_perceptron(job) && (job->d_out || !job->rows);
    for (int64_t l = 0; valid && l < job->layers; l++) valid = (job->dw[l] || !job->sizes[l]) && job->db[l];
    return valid ? chosen->perceptron_backward(job) : INVALID_JOB;
}

EXPORT int holdfast_objective(const Objective *job) {
    if (job->rows < 0 || job->actions < 1 || !job->terms) return INVALID_JOB;
    const int inputs = job->logits && job->chosen && job->value && job->old_log_prob && job->old_value && job->advantage;
    const int whole = inputs && job->returns && job->d_logits && job->d_value;
    return whole || !job->rows ? chosen->objective(job) : INVALID_JOB;
}

EXPORT int holdfast_adam(const Adam *job) {
    int valid = job->tensors >= 0 && job->step > 0 && job->norm;
    if (valid && job->tensors)
        valid = job->count && job->parameter && job->mean && job->square && job->gradient;
    for (int64_t t = 0; valid && t < job->tensors; t++) {
        const int arrays = job->parameter[t] && job->mean[t] && job->square[t] && job->gradient[t];
        valid = job->count[t] == 0 || (job->count[t] > 0 && arrays);
    }
    return valid ? chosen->adam(job) : INVALID_JOB;
}

#define KEEP_AT_MOST ((size_t)32 << 20)

typedef struct {
    Block block[PURPOSES];
} Kept;

static pthread_key_t kept_key;
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;

static void release(void *argument) {
    Kept *kept = argument;
    for (int purpose = 0; purpose < PURPOSES; purpose++) free(kept->block[purpose].memory);
    free(kept);
}
static void make_key(void) { pthread_key_create(&kept_key, release); }

static Kept *kept_by_this_thread(void) {
    pthread_once(&kept_once, make_key);
    Kept *kept = pthread_getspecific(kept_key);
    if (!kept && (kept = calloc(1, sizeof *kept))) pthread_setspecific(kept_key, kept);
    return kept;
}

/* Large blocks lie in huge pages where the system has them: in small ones the weights of a thin batch, read again at every
 * step, collide in the cache and cost the processor a look at the page table every 64 lines. */
static Block allocate(size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const size_t huge = (size_t)2 << 20;
    if (bytes >= huge / 2) {
        bytes = (bytes + huge - 1) / huge * huge;
        void *memory = aligned_alloc(huge, bytes);
        if (memory) madvise(memory, bytes, MADV_HUGEPAGE);
        return (Block){memory, bytes};
    }
#endif
    return (Block){aligned_alloc(64, bytes), bytes};
}

Block holdfast_borrow(Purpose purpose, size_t bytes) {
    Kept *kept = kept_by_this_thread();
    if (kept) {
        Block block = kept->block[purpose];
        kept->block[purpose] = (Block){NULL, 0};
        if (block.bytes >= bytes) return block;
        free(block.memory);
    }
    return allocate(bytes);
}

void holdfast_give_back(Purpose purpose, Block block) {
    Kept *kept = kept_by_this_thread();
    if (kept && !kept->block[purpose].memory && block.bytes <= KEEP_AT_MOST) kept->block[purpose] = block;
    else free(block.memory);
}
