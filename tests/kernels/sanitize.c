/* Runs every function of the native kernel over odd and random sizes with arrays of exactly the required size, under
 * tools that check memory and threads: sanitize SEED COUNT. Numbers are checked elsewhere; here every result only has to
 * be finite. Calls without their arrays have to be refused. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"

const char *holdfast_choose(const char *name);
int64_t holdfast_lanes(void);
int holdfast_forward(const Job *job), holdfast_backward(const Job *job), holdfast_step(const Job *job);
int holdfast_perceptron_forward(const Perceptron *job), holdfast_perceptron_backward(const Perceptron *job);
int holdfast_linear_forward(const LinearRecurrence *job), holdfast_linear_backward(const LinearRecurrence *job);
int holdfast_objective(const Objective *job), holdfast_adam(const Adam *job);
int64_t holdfast_meet(int64_t *arrived, int64_t rank, int64_t processes, int64_t count, int64_t patience);
int64_t holdfast_sum_ranks(RankSum *job, int64_t patience);

static float *numbers(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float) + (count == 0));
    for (int64_t i = 0; i < count; i++) p[i] = (float)(rand() % 2001 - 1000) / 2000.0f;
    return p;
}

static void all_finite(const char *what, const float *p, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(p[i])) {
            fprintf(stderr, "%s[%lld] is not finite\n", what, (long long)i);
            exit(1);
        }
}

static void succeed(int status) {
    if (status) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
}

static void run(int64_t T, int64_t B, int64_t I, int64_t H, int lstm, int detach, int reset_values, int bias, double p, int threads) {
    const int64_t G = lstm ? 4 : 3, padded = (H + holdfast_lanes() - 1) / holdfast_lanes() * holdfast_lanes();
    float *owned[32];
    int count = 0;
#define NEW(n) (owned[count++] = numbers(n))
    uint8_t *resets = malloc((size_t)(T * B) + 1);
    for (int64_t i = 0; i < T * B; i++) resets[i] = rand() < p * RAND_MAX;
    Job job = {.steps = T, .batch = B, .inputs = I, .hidden = H, .is_lstm = lstm, .detach_at_reset = detach, .threads = threads};
    job.x = NEW(T * B * I);
    job.h0 = NEW(B * H);
    job.c0 = lstm ? NEW(B * H) : NULL;
    job.resets = p < 0 ? NULL : resets;
    job.reset_h = reset_values ? NEW(H) : NULL;
    job.reset_c = reset_values && lstm ? NEW(H) : NULL;
    job.w_ih = NEW(G * H * I);
    job.w_hh = NEW(G * H * H);
    job.b_ih = bias ? NEW(G * H) : NULL;
    job.b_hh = bias ? NEW(G * H) : NULL;
    job.y = NEW(T * B * H);
    job.h_n = NEW(B * H);
    job.c_n = lstm ? NEW(B * H) : NULL;
    succeed(holdfast_forward(&job)); /* nothing kept */
    job.gates = NEW(T * B * 4 * padded);
    job.cells = lstm ? NEW(T * B * padded) : NULL;
    succeed(holdfast_forward(&job));
    all_finite("y", job.y, T * B * H);
    all_finite("h_n", job.h_n, B * H);
    if (lstm) all_finite("c_n", job.c_n, B * H);

    job.dy = NEW(T * B * H);
    job.dh_n = NEW(B * H);
    job.dc_n = lstm ? NEW(B * H) : NULL;
    succeed(holdfast_backward(&job)); /* no gradient needed */
    job.dx = NEW(T * B * I);
    job.dh0 = NEW(B * H);
    job.dc0 = lstm ? NEW(B * H) : NULL;
    job.d_reset_h = reset_values ? NEW(H) : NULL;
    job.d_reset_c = reset_values && lstm ? NEW(H) : NULL;
    job.dw_ih = NEW(G * H * I);
    job.dw_hh = NEW(G * H * H);
    job.db_ih = bias ? NEW(G * H) : NULL;
    job.db_hh = bias ? NEW(G * H) : NULL;
    succeed(holdfast_backward(&job));
    all_finite("dx", job.dx, T * B * I);
    all_finite("dw_ih", job.dw_ih, G * H * I);
    all_finite("dw_hh", job.dw_hh, G * H * H);

    if (T == 1 && !detach) {
        job.gates = job.cells = job.h_n = NULL;
        succeed(holdfast_step(&job));
        all_finite("h", job.y, B * H);
    }
    while (count) free(owned[--count]);
    free(resets);
}

static void run_perceptron(int64_t rows, int64_t layers, const int64_t *sizes, int activation, int dx, int threads) {
    float *owned[64];
    int count = 0;
    Perceptron job = {.rows = rows, .layers = layers, .threads = threads};
    job.sizes[0] = sizes[0];
    job.x = NEW(rows * sizes[0]);
    for (int64_t l = 0; l < layers; l++) {
        job.sizes[l + 1] = sizes[l + 1];
        job.activation[l] = l + 1 < layers ? activation : IDENTITY;
        job.w[l] = NEW(sizes[l] * sizes[l + 1]);
        job.b[l] = NEW(sizes[l + 1]);
        job.out[l] = NEW(rows * sizes[l + 1]);
        job.dw[l] = NEW(sizes[l] * sizes[l + 1]);
        job.db[l] = NEW(sizes[l + 1]);
    }
    job.d_out = NEW(rows * sizes[layers]);
    job.dx = dx ? NEW(rows * sizes[0]) : NULL;
    succeed(holdfast_perceptron_forward(&job));
    succeed(holdfast_perceptron_backward(&job));
    for (int64_t l = 0; l < layers; l++) {
        all_finite("out", job.out[l], rows * sizes[l + 1]);
        all_finite("dw", job.dw[l], sizes[l] * sizes[l + 1]);
        all_finite("db", job.db[l], sizes[l + 1]);
    }
    if (dx) all_finite("dx", job.dx, rows * sizes[0]);
    while (count) free(owned[--count]);
}

static void run_linear(int64_t T, int64_t B, int64_t C, LinearForm form, int per_channel, int detach, int fill, double p, int threads) {
    const int64_t W = form == COMPLEX ? 2 * C : C;
    float *owned[32];
    int count = 0;
    uint8_t *resets = malloc((size_t)(T * B) + 1);
    for (int64_t i = 0; i < T * B; i++) resets[i] = rand() < p * RAND_MAX;
    LinearRecurrence job = {.steps = T, .batch = B, .channels = C, .form = form, .a_per_channel = per_channel};
    job.detach_at_reset = detach, job.threads = threads;
    job.a = form == GATED ? NULL : NEW(per_channel ? W : T * B * W);
    job.b = NEW(T * B * (form == GATED ? 2 * W : W));
    job.h0 = NEW(B * W);
    job.resets = p < 0 ? NULL : resets;
    job.fill = fill ? NEW(W) : NULL;
    job.h = NEW(T * B * W), job.h_n = NEW(B * W);
    succeed(holdfast_linear_forward(&job));
    all_finite("h", job.h, T * B * W);
    all_finite("h_n", job.h_n, B * W);
    job.dh = fill ? NEW(T * B * W) : NULL, job.dh_n = NEW(B * W);
    job.da = form == GATED ? NULL : NEW(per_channel ? W : T * B * W);
    job.db = NEW(T * B * (form == GATED ? 2 * W : W));
    job.dh0 = NEW(B * W);
    job.d_fill = fill ? NEW(W) : NULL;
    succeed(holdfast_linear_backward(&job));
    all_finite("db", job.db, T * B * (form == GATED ? 2 * W : W));
    all_finite("dh0", job.dh0, B * W);
    if (job.da) all_finite("da", job.da, per_channel ? W : T * B * W);
    if (job.d_fill) all_finite("d_fill", job.d_fill, W);
    while (count) free(owned[--count]);
    free(resets);
}

static void run_objective(int64_t rows, int64_t actions, int some_valid, double clip_value) {
    float *owned[64];
    int count = 0;
    int64_t *chosen = malloc((size_t)(rows + 1) * sizeof(int64_t));
    uint8_t *valid = malloc((size_t)rows + 1);
    for (int64_t n = 0; n < rows; n++) chosen[n] = rand() % actions, valid[n] = (uint8_t)(rand() % 2);
    Objective job = {.rows = rows, .actions = actions, .chosen = chosen, .valid = some_valid ? valid : NULL};
    job.clip_range = 0.2, job.clip_value = clip_value, job.entropy_coef = 0.01, job.value_coef = 0.5;
    job.logits = NEW(rows * actions);
    job.value = NEW(rows), job.old_log_prob = NEW(rows), job.old_value = NEW(rows);
    job.advantage = NEW(rows), job.returns = NEW(rows);
    job.d_logits = NEW(rows * actions), job.d_value = NEW(rows), job.terms = NEW(6);
    succeed(holdfast_objective(&job));
    all_finite("d_logits", job.d_logits, rows * actions);
    all_finite("d_value", job.d_value, rows);
    all_finite("terms", job.terms, 6);
    while (count) free(owned[--count]);
    free(chosen);
    free(valid);
}

static void run_adam(const int64_t *counts, int64_t tensors) {
    float *owned[64], *p[4], *m[4], *v[4], *g[4], *steps[4];
    int count = 0;
    double norm;
    for (int64_t t = 0; t < tensors; t++) {
        p[t] = NEW(counts[t]), m[t] = NEW(counts[t]), v[t] = NEW(counts[t]), g[t] = NEW(counts[t]), steps[t] = NEW(1);
        for (int64_t i = 0; i < counts[t]; i++) v[t][i] = fabsf(v[t][i]);
    }
    Adam job = {.tensors = tensors, .step = 3, .count = counts, .parameter = p, .mean = m, .square = v};
    job.gradient = (const float *const *)g;
    job.rate = 1e-3, job.beta1 = 0.9, job.beta2 = 0.999, job.eps = 1e-8, job.max_norm = 0.5, job.norm = &norm;
    succeed(holdfast_adam(&job));
    job.steps_taken = steps;
    succeed(holdfast_adam(&job));
    for (int64_t t = 0; t < tensors; t++) all_finite("p", p[t], counts[t]);
    while (count) free(owned[--count]);
}

/* A job with the given sizes and without arrays. */
static void refuse(int status) {
    if (status != INVALID_JOB) {
        fprintf(stderr, "a call without its arrays was not refused\n");
        exit(1);
    }
}
static void refuse_all(int64_t size) {
    const Job job = {.steps = 1, .batch = size, .inputs = size, .hidden = size, .is_lstm = size % 2, .threads = 1};
    refuse(holdfast_forward(&job)), refuse(holdfast_backward(&job)), refuse(holdfast_step(&job));
    const Perceptron perceptron = {.rows = size, .layers = size, .threads = 1, .sizes = {3, 3}};
    refuse(holdfast_perceptron_forward(&perceptron)), refuse(holdfast_perceptron_backward(&perceptron));
    const Objective objective = {.rows = size, .actions = size};
    refuse(holdfast_objective(&objective));
    const Adam adam = {.tensors = size, .step = 1};
    refuse(holdfast_adam(&adam));
}

/* Threads stand for processes: each writes its number before the barrier, and reads those of all others after it. */
#define MEETING 3
#define SLOT 50
static int64_t arrived[MEETING * 8], written[MEETING];
static float slots[(MEETING + 1) * SLOT];

static void *meet_often(void *argument) {
    const int64_t rank = (int64_t *)argument - written;
    for (int64_t count = 1; count < 200; count += 2) {
        written[rank] = count;
        int64_t late = holdfast_meet(arrived, rank, MEETING, count, (int64_t)60e9);
        for (int other = 0; other < MEETING; other++)
            if (late >= 0 || written[other] != count) exit(1);
        late = holdfast_meet(arrived, rank, MEETING, count + 1, (int64_t)60e9);
        if (late >= 0) exit(1);
    }
    float x[SLOT];
    RankSum job = {.rank = rank, .processes = MEETING, .slot = SLOT, .arrived = arrived, .slots = slots, .meeting = 200, .x = x};
    for (job.count = 0; job.count <= SLOT; job.count++) {
        for (int64_t i = 0; i < job.count; i++) x[i] = (float)(rank + i);
        if (holdfast_sum_ranks(&job, (int64_t)60e9) >= 0) exit(1);
        for (int64_t i = 0; i < job.count; i++)
            if (x[i] != (float)(MEETING * i + 3)) exit(1);
    }
    if (holdfast_sum_ranks(&job, 0) != -2) exit(1); /* more than a slot */
    return NULL;
}

static void run_meetings(void) {
    pthread_t threads[MEETING];
    memset(arrived, 0, sizeof arrived);
    for (int n = 0; n < MEETING; n++) pthread_create(&threads[n], NULL, meet_often, &written[n]);
    for (int n = 0; n < MEETING; n++) pthread_join(threads[n], NULL);
    if (holdfast_meet(arrived, 0, MEETING, 1000, 1000) != 1) exit(1); /* nobody else comes */
}

static int64_t up_to(int64_t most) { return rand() % (most + 1); }

static void run_random(void) {
    const double p[] = {-1.0, 0.0, 0.1, 0.5, 1.1};
    const int64_t T = up_to(3) ? up_to(40) : 1;
    run(T, up_to(40), up_to(70), 1 + up_to(70), rand() % 2, rand() % 2, rand() % 2, rand() % 2, p[rand() % 5], 1 + (int)up_to(4));
    int64_t widths[MAX_LAYERS + 1];
    for (int l = 0; l <= MAX_LAYERS; l++) widths[l] = 1 + up_to(70);
    run_perceptron(up_to(300), 1 + up_to(MAX_LAYERS - 1), widths, rand() % 2 ? TANH : RELU, rand() % 2, 1 + (int)up_to(4));
    run_objective(up_to(60), 1 + up_to(50), rand() % 2, rand() % 2 ? -1.0 : 0.2);
    run_adam((const int64_t[]){up_to(5000), up_to(40), up_to(3), 1 + up_to(300)}, 1 + up_to(3));
}

int main(int argc, char **argv) {
    const unsigned seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1;
    const int count = argc > 2 ? atoi(argv[2]) : 50;
    srand(seed);
    const char *isas[] = {"plain", "avx2", "avx512"};
    const int64_t shapes[][4] = {{1, 1, 1, 1},    {3, 2, 5, 7},   {7, 3, 16, 16}, {5, 65, 3, 33}, {130, 1, 9, 20},
                                 {20, 13, 70, 8}, {1, 5, 17, 31}, {1, 30, 4, 6},  {0, 3, 2, 4},   {4, 0, 2, 4},
                                 {2, 200, 1, 3},  {3, 9, 65, 100}};
    const int64_t widths[][5] = {{1, 1, 1, 1, 1}, {5, 33, 7, 2, 1}, {64, 64, 64, 4, 3}, {16, 200, 17, 65, 100}};
    int sets = 0;
    run_meetings();
    for (int i = 0; i < 3; i++) {
        if (!holdfast_choose(isas[i])) continue;
        sets++;
        for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++)
            for (int lstm = 0; lstm < 2; lstm++)
                for (int mode = 0; mode < 4; mode++) {
                    const int64_t *s = shapes[n];
                    const double p = mode == 0 ? -1.0 : mode == 1 ? 0.3 : mode == 2 ? 1.1 : 0.3;
                    run(s[0], s[1], s[2], s[3], lstm, mode == 3, mode == 1, mode != 2, p, mode % 2 ? 3 : 1);
                }
        for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++)
            for (int form = REAL; form <= GATED; form++)
                for (int mode = 0; mode < 4; mode++) {
                    const double p = mode == 0 ? -1.0 : mode == 1 ? 0.3 : mode == 2 ? 1.1 : 0.3;
                    run_linear(shapes[n][0], shapes[n][1], shapes[n][3], form, mode % 2, mode == 3, mode == 1, p, mode % 2 ? 3 : 1);
                }
        for (size_t n = 0; n < sizeof widths / sizeof *widths; n++)
            for (int64_t rows = 0; rows < 260; rows = 3 * rows + 1)
                for (int64_t layers = 1; layers <= 4; layers++)
                    run_perceptron(rows, layers, widths[n], layers % 2 ? TANH : RELU, layers % 2, rows > 100 ? 3 : 1);
        for (int64_t actions = 1; actions < 40; actions = 2 * actions + 1)
            for (int64_t rows = 0; rows < 20; rows += 7) run_objective(rows, actions, rows % 2, rows - 8.0);
        run_adam((const int64_t[]){1, 0, 17, 2500}, 4);
        for (int64_t size = -1; size < 4; size++)
            if (size) refuse_all(size);
        for (int n = 0; n < count; n++) run_random();
    }
    printf("%d instruction sets, %d random calls of each function, seed %u\n", sets, count * sets, seed);
    return 0;
}
