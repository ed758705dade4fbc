/* A pool of threads that take parts of one call. The caller takes parts too and waits only for those in progress, so that
 * on a busy machine, where no other thread is scheduled, a call takes no longer than on one thread. */
#include <pthread.h>

#include "job.h"

#define MAX_THREADS 64
#define SPINS 4000 /* some tens of microseconds: about what going to sleep and waking up costs */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    void (*work)(void *, int64_t);
    void *context;
    int64_t parts, next, active; /* active: parts that threads of the pool are working on */
    int busy;                    /* some call owns the pool */
    int threads;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void *serve(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.next >= pool.parts) pthread_cond_wait(&pool.wake, &pool.lock);
        int64_t part = pool.next++;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        pool.work(pool.context, part);
        pthread_mutex_lock(&pool.lock);
        if (__atomic_sub_fetch(&pool.active, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void start_threads(int64_t wanted) {
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.threads < wanted && pool.threads < MAX_THREADS && !pthread_create(&thread, &attributes, serve, NULL))
        pool.threads++;
    pthread_attr_destroy(&attributes);
}

/* The child of a fork has no threads, and the lock may have been held: start over. */
static void start_over(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.parts = pool.next = pool.active = 0;
    pool.busy = pool.threads = 0;
}
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void watch_forks(void) { pthread_atfork(NULL, NULL, start_over); }

/* Whether this call may use the pool: another call may have it already. */
static int own_pool(void) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    int mine = !pool.busy;
    if (mine) pool.busy = 1;
    pthread_mutex_unlock(&pool.lock);
    return mine;
}

void holdfast_parallel(void (*work)(void *, int64_t), void *context, int64_t parts) {
    if (parts <= 1 || !own_pool()) {
        for (int64_t part = 0; part < parts; part++) work(context, part);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_threads(parts - 1);
    pool.work = work;
    pool.context = context;
    pool.parts = parts;
    pool.next = 0;
    pthread_cond_broadcast(&pool.wake);
    while (pool.next < pool.parts) {
        int64_t part = pool.next++;
        pthread_mutex_unlock(&pool.lock);
        work(context, part);
        pthread_mutex_lock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < SPINS && __atomic_load_n(&pool.active, __ATOMIC_ACQUIRE); i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    pthread_mutex_lock(&pool.lock);
    while (pool.active) pthread_cond_wait(&pool.done, &pool.lock);
    pool.busy = 0;
    pthread_mutex_unlock(&pool.lock);
}
