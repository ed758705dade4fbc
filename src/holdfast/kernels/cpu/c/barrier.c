/* A barrier between processes of one machine, on counters in memory that they share. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define COUNTERS_PER_LINE 8 /* each process has a cache line of its own */
#define SPINS 200           /* some microseconds: a process that is about to arrive is not left for another one */
#define YIELDING 3000000    /* nanoseconds: longer waits go to sleep */
#define LONGEST_SLEEP 1000000

static int64_t nanoseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax(int64_t spins, int64_t waited) {
    if (spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    } else if (waited < YIELDING) {
        sched_yield();
    } else {
        const int64_t sleep = waited / 16 < LONGEST_SLEEP ? waited / 16 : LONGEST_SLEEP;
        nanosleep(&(struct timespec){0, sleep}, NULL);
    }
}

/* Says that this process has arrived for the `count`th time and waits until all have. Returns -1, or after `patience`
 * nanoseconds the first process that has not arrived; it may then be called again. What a process wrote before is visible
 * to all others after. arrived: [processes, COUNTERS_PER_LINE], zeros at first. */
EXPORT int64_t holdfast_meet(int64_t *arrived, int64_t rank, int64_t processes, int64_t count, int64_t patience) {
    __atomic_store_n(&arrived[rank * COUNTERS_PER_LINE], count, __ATOMIC_RELEASE);
    int64_t began = 0, waited = 0, spins = 0;
    for (int64_t other = 0; other < processes; other++)
        while (__atomic_load_n(&arrived[other * COUNTERS_PER_LINE], __ATOMIC_ACQUIRE) < count) {
            if (spins >= SPINS) {
                if (!began) began = nanoseconds_now();
                waited = nanoseconds_now() - began;
                if (waited >= patience) return other;
            }
            relax(spins++, waited);
        }
    return -1;
}
