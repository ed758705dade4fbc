/* What Python calls: the choice of an instruction set, and threads. */
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
 * CPU does not have it (the choice stays as it was). Not to be called while a recurrence runs. */
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

/* Which sources this library was built from: native_build.key(). */
#if !defined(HOLDFAST_KEY)
#define HOLDFAST_KEY ""
#endif
EXPORT const char *holdfast_key(void) { return HOLDFAST_KEY; }

EXPORT int64_t holdfast_lanes(void) { return chosen->lanes; }
EXPORT int holdfast_forward(const Job *job) { return chosen->forward(job); }
EXPORT int holdfast_backward(const Job *job) { return chosen->backward(job); }
EXPORT int holdfast_step(const Job *job) { return chosen->step(job); }

/* GOMP_parallel of the OpenMP runtime that torch uses, if Python found it. Its threads exist already, and a second set
 * of threads would compete with them: they spin for a while after each of torch's own products. */
typedef void (*OpenMp)(void (*)(void *), void *, unsigned int, unsigned int);
static OpenMp open_mp;
EXPORT void holdfast_use_openmp(OpenMp runtime) { open_mp = runtime; }

typedef struct {
    void (*work)(void *, int64_t);
    void *context;
    int64_t parts, next;
} Queue;

static void drain(void *argument) {
    Queue *queue = argument;
    for (;;) {
        int64_t part = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        if (part >= queue->parts) return;
        queue->work(queue->context, part);
    }
}

static void *drain_thread(void *argument) {
    drain(argument);
    return NULL;
}

void holdfast_parallel(void (*work)(void *, int64_t), void *context, int64_t parts) {
    Queue queue = {work, context, parts, 0};
    if (parts <= 1) {
        drain(&queue);
    } else if (open_mp) {
        open_mp(drain, &queue, (unsigned int)parts, 0);
    } else {
        pthread_t helpers[64];
        int64_t started = 0;
        while (started < parts - 1 && started < 64 && !pthread_create(&helpers[started], NULL, drain_thread, &queue)) started++;
        drain(&queue); /* does the work of every helper that could not be started */
        for (int64_t i = 0; i < started; i++) pthread_join(helpers[i], NULL);
    }
}
