/* A barrier between processes of one machine, on counters in memory that they share, and sums over those processes. */
#define _GNU_SOURCE
#include <limits.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "job.h"

#define EXPORT __attribute__((visibility("default")))
#define LINE 8            /* int64s in a cache line */
#define SPINNING 100000   /* nanoseconds: what is about to come is not slept for, if everybody has a processor */
#define SPINS_PER_LOOK 16 /* at the clock */
#define ALL_ARRIVED -1    /* otherwise functions return the first process that is late */
#define NO_SUM -2         /* an array that is needed is NULL, or it does not fit */

static int64_t nanoseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t arrivals(const int64_t *counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }

/* Sleep until a counter is no longer `seen`, or so many nanoseconds. counter[1] is how many sleep: nobody else is woken. */
static void sleep_on(int64_t *counter, int64_t seen, int64_t nanoseconds) {
    struct timespec most = {nanoseconds / 1000000000, nanoseconds % 1000000000};
#if defined(__linux__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    __atomic_add_fetch(&counter[1], 1, __ATOMIC_SEQ_CST);
    if (arrivals(counter) == seen) syscall(SYS_futex, counter, FUTEX_WAIT, (uint32_t)seen, &most, NULL, 0);
    __atomic_sub_fetch(&counter[1], 1, __ATOMIC_SEQ_CST);
#else
    most = (struct timespec){0, smaller(nanoseconds, 100000)};
    nanosleep(&most, NULL);
#endif
}

static void arrive(int64_t *counter, int64_t count) {
    __atomic_store_n(counter, count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&counter[1], __ATOMIC_SEQ_CST) > 0) syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

static int64_t processors(void) {
    static int64_t found = 0;
    if (!found) __atomic_store_n(&found, (int64_t)sysconf(_SC_NPROCESSORS_ONLN), __ATOMIC_RELAXED);
    return found;
}

/* Says that this process has come to meeting number `count` and waits until all have. Returns ALL_ARRIVED, or after
 * `patience` nanoseconds the first process that has not come; it may then be called again. What a process wrote before is
 * visible to all others after. arrived: see RankSum, zeros at first. */
EXPORT int64_t holdfast_meet(int64_t *arrived, int64_t rank, int64_t processes, int64_t count, int64_t patience) {
    if (arrivals(&arrived[rank * LINE]) != count) arrive(&arrived[rank * LINE], count);
    const int64_t spinning = processes <= processors() ? SPINNING : 0;
    int64_t began = 0, waited = 0;
    for (int64_t other = 0; other < processes; other++) {
        int64_t *counter = &arrived[other * LINE], seen;
        for (int64_t spins = 1; (seen = arrivals(counter)) < count; spins++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            if (spins % SPINS_PER_LOOK) continue;
            if (!began) began = nanoseconds_now();
            waited = nanoseconds_now() - began;
            if (waited >= patience) return other;
            if (waited >= spinning) sleep_on(counter, seen, patience - waited);
        }
    }
    return ALL_ARRIVED;
}

/* Each process adds up its part of all slots, in the order of processes: one result, the same bits for all. */
static void add_part(const RankSum *job) {
    const int64_t line = 16, each = (job->count + job->processes * line - 1) / (job->processes * line) * line;
    const int64_t begin = smaller(job->count, job->rank * each), end = smaller(job->count, begin + each);
    float *out = job->slots + job->processes * job->slot;
    if (begin < end) memcpy(out + begin, job->slots + begin, (size_t)(end - begin) * sizeof *out);
    for (int64_t other = 1; other < job->processes; other++) {
        const float *in = job->slots + other * job->slot;
        for (int64_t i = begin; i < end; i++) out[i] += in[i];
    }
}

/* Sums over processes, in place. Returns as holdfast_meet does; called again, it continues where it stopped. */
EXPORT int64_t holdfast_sum_ranks(RankSum *job, int64_t patience) {
    if (job->count < 0 || job->count > job->slot || !job->x || !job->slots || !job->arrived) return NO_SUM;
    const size_t bytes = (size_t)job->count * sizeof *job->x;
    int64_t late;
    if (job->phase == 0) {
        memcpy(job->slots + job->rank * job->slot, job->x, bytes);
        job->meeting++, job->phase = 1;
    }
    if (job->phase == 1) {
        if ((late = holdfast_meet(job->arrived, job->rank, job->processes, job->meeting, patience)) >= 0) return late;
        add_part(job);
        job->meeting++, job->phase = 2;
    }
    if ((late = holdfast_meet(job->arrived, job->rank, job->processes, job->meeting, patience)) >= 0) return late;
    memcpy(job->x, job->slots + job->processes * job->slot, bytes);
    job->phase = 0;
    return ALL_ARRIVED;
}
