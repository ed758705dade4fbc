/* The functions Python calls, the choice of an instruction set, and the scratch memory that threads keep. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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
EXPORT int holdfast_forward(const Job *job) { return chosen->forward(job); }
EXPORT int holdfast_backward(const Job *job) { return chosen->backward(job); }
EXPORT int holdfast_step(const Job *job) { return chosen->step(job); }
EXPORT int holdfast_linear_forward(const LinearRecurrence *job) { return chosen->linear_forward(job); }
EXPORT int holdfast_linear_backward(const LinearRecurrence *job) { return chosen->linear_backward(job); }
EXPORT int holdfast_perceptron_forward(const Perceptron *job) { return chosen->perceptron_forward(job); }
EXPORT int holdfast_perceptron_backward(const Perceptron *job) { return chosen->perceptron_backward(job); }
EXPORT int holdfast_objective(const Objective *job) { return chosen->objective(job); }
EXPORT int holdfast_adam(const Adam *job) { return chosen->adam(job); }

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

Block holdfast_borrow(Purpose purpose, size_t bytes) {
    Kept *kept = kept_by_this_thread();
    if (kept) {
        Block block = kept->block[purpose];
        kept->block[purpose] = (Block){NULL, 0};
        if (block.bytes >= bytes) return block;
        free(block.memory);
    }
    return (Block){aligned_alloc(64, bytes), bytes};
}

void holdfast_give_back(Purpose purpose, Block block) {
    Kept *kept = kept_by_this_thread();
    if (kept && !kept->block[purpose].memory && block.bytes <= KEEP_AT_MOST) kept->block[purpose] = block;
    else free(block.memory);
}
