/* A step of Adam with the gradients scaled down to a norm, over many small tensors in one call. */
#ifndef HOLDFAST_ADAM_H
#define HOLDFAST_ADAM_H

#include <math.h>

#include "layout.h"

INLINE double sum_of_squares(const float *g, int64_t count) {
    double total = 0.0;
    for (int64_t from = 0; from < count; from += 1024) { /* short sums in float, their sum in double */
        const int64_t here = smaller(1024, count - from);
        vec sum = splat(0.0f);
        for (int64_t i = 0; i < here; i += LANES) {
            vec part = load_first(g + from + i, here - i);
            sum += part * part;
        }
        float lanes[LANES];
        store(lanes, sum);
        for (int i = 0; i < LANES; i++) total += lanes[i];
    }
    return total;
}

static int adam(const Adam *job) {
    double squares = 0.0;
    for (int64_t t = 0; t < job->tensors; t++) squares += sum_of_squares(job->gradient[t], job->count[t]);
    const double norm = sqrt(squares);
    *job->norm = norm;
    if (!isfinite(norm)) return 0;

    const float scale = (float)(norm > job->max_norm ? job->max_norm / norm : 1.0);
    const float keep1 = (float)job->beta1, take1 = (float)(1 - job->beta1);
    const float keep2 = (float)job->beta2, take2 = (float)(1 - job->beta2), eps = (float)job->eps;
    const float rate = (float)(job->rate / (1 - pow(job->beta1, (double)job->step)));
    const float spread = (float)(1 / sqrt(1 - pow(job->beta2, (double)job->step)));
    for (int64_t t = 0; t < job->tensors; t++) {
        float *restrict p = job->parameter[t], *restrict m = job->mean[t], *restrict v = job->square[t];
        const float *restrict gradient = job->gradient[t];
        for (int64_t i = 0; i < job->count[t]; i++) {
            const float g = gradient[i] * scale;
            m[i] = keep1 * m[i] + take1 * g;
            v[i] = keep2 * v[i] + take2 * g * g;
            p[i] -= rate * m[i] / (sqrtf(v[i]) * spread + eps);
        }
        if (job->steps_taken) *job->steps_taken[t] += 1.0f;
    }
    return 0;
}

#endif
