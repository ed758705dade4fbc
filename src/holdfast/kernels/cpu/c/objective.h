/* PPO's clipped objective of a categorical policy, row by row, and its gradient in closed form. */
#ifndef HOLDFAST_OBJECTIVE_H
#define HOLDFAST_OBJECTIVE_H

#include <math.h>

#include "layout.h"

/* exp(x) for x <= 0; NaN stays. */
INLINE vec exp_(vec x) {
    vec n, q, r = reduce(clamp(x, -86.0f, 0.0f), &n, &q);
    return scale2(r * q + splat(1.0f), n);
}

typedef struct {
    float largest, log_sum; /* log p[a] = logits[a] - largest - log_sum */
    float entropy;
} Distribution;

/* Probabilities into p [actions]. */
INLINE Distribution softmax(float *p, const float *logits, int64_t actions) {
    Distribution d = {logits[0], 0.0f, 0.0f};
    for (int64_t a = 1; a < actions; a++) d.largest = logits[a] > d.largest ? logits[a] : d.largest;
    for (int64_t a = 0; a < actions; a += LANES)
        store_first(p + a, exp_(load_first(logits + a, actions - a) - splat(d.largest)), actions - a);
    float sum = 0.0f, expected = 0.0f;
    for (int64_t a = 0; a < actions; a++) {
        sum += p[a];
        expected += p[a] * (logits[a] - d.largest);
    }
    for (int64_t a = 0; a < actions; a++) p[a] /= sum;
    d.log_sum = logf(sum);
    d.entropy = d.log_sum - expected / sum;
    return d;
}

static int objective(const Objective *job) {
    const int64_t actions = job->actions;
    const float clip = (float)job->clip_range, clip_value = (float)job->clip_value;
    double count = 0.0, gains = 0.0, squares = 0.0, entropies = 0.0, kl = 0.0, clipped = 0.0;
    for (int64_t n = 0; n < job->rows; n++) count += !job->valid || job->valid[n];
    const float weight = (float)(1.0 / (count > 1.0 ? count : 1.0));

    for (int64_t n = 0; n < job->rows; n++) {
        float *d_logits = job->d_logits + n * actions;
        if (job->valid && !job->valid[n]) {
            zero(d_logits, actions);
            job->d_value[n] = 0.0f;
            continue;
        }
        const int64_t chosen = job->chosen[n];
        if (chosen < 0 || chosen >= actions) return 2;
        const float *logits = job->logits + n * actions;
        const Distribution policy = softmax(d_logits, logits, actions);

        const float log_ratio = logits[chosen] - policy.largest - policy.log_sum - job->old_log_prob[n];
        const float ratio = expf(log_ratio), advantage = job->advantage[n], gain = advantage * ratio;
        const float within = ratio < 1 - clip ? 1 - clip : ratio > 1 + clip ? 1 + clip : ratio;
        const float clipped_gain = advantage * within;
        const float d_log_prob = gain <= clipped_gain ? -weight * gain : 0.0f;
        gains += gain <= clipped_gain ? gain : clipped_gain; /* NaN: the second, which is NaN too */
        entropies += policy.entropy;
        kl += ratio - 1 - log_ratio;
        clipped += fabsf(ratio - 1) > clip;

        float error = job->value[n] - job->returns[n], square = error * error;
        if (clip_value >= 0.0f) {
            const float old = job->old_value[n], moved = job->value[n] - old;
            const float near = old + (moved < -clip_value ? -clip_value : moved > clip_value ? clip_value : moved) - job->returns[n];
            if (near * near > square) {
                square = near * near;
                error = fabsf(moved) <= clip_value ? near : 0.0f;
            }
        }
        squares += square;
        job->d_value[n] = error * weight * (float)job->value_coef;

        const float d_entropy = -weight * (float)job->entropy_coef;
        for (int64_t a = 0; a < actions; a++) {
            const float p = d_logits[a], log_p = logits[a] - policy.largest - policy.log_sum;
            d_logits[a] = d_log_prob * ((a == chosen) - p) - d_entropy * p * (log_p + policy.entropy);
        }
    }

    const double policy_loss = -gains * weight, value_loss = 0.5 * squares * weight, entropy = entropies * weight;
    const double loss = policy_loss + job->value_coef * value_loss - job->entropy_coef * entropy;
    const double terms[6] = {loss, policy_loss, value_loss, entropy, kl * weight, clipped * weight};
    for (int i = 0; i < 6; i++) job->terms[i] = (float)terms[i];
    if (!isfinite(loss)) job->d_value[0] = NAN;
    return 0;
}

#endif
