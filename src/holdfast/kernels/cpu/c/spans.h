/* A span is what lies between two resets of a batch row. Nothing passes from one span to the next, so each is a row of its
 * own: a thin batch with resets becomes a wider and shorter one, and the weights are read fewer times.
 *
 * Spans are sorted by length, longest first. A group of neighbors runs side by side; the spans still active at a step
 * are the first ones of the group. */
#ifndef HOLDFAST_SPANS_H
#define HOLDFAST_SPANS_H

#include "layout.h"

typedef struct {
    int64_t row, begin, length; /* batch row; steps [begin, begin + length) */
    int64_t fresh;              /* begins with a reset */
} Span;

/* Whether a span of batch row `row` begins at step t. */
INLINE int is_reset(const Job *job, int64_t t, int64_t row) { return job->resets && job->resets[t * job->batch + row]; }

static int64_t count_spans(const Job *job, int64_t from, int64_t to, int split) {
    int64_t count = to - from;
    for (int64_t t = 1; split && job->resets && t < job->steps; t++)
        for (int64_t row = from; row < to; row++) count += is_reset(job, t, row);
    return count;
}

/* The spans of batch rows [from, to), of whole rows if not `split`. `starts` is scratch of steps + 1 numbers. */
static void find_spans(Span *out, int64_t *starts, const Job *job, int64_t from, int64_t to, int split) {
    memset(starts, 0, (size_t)(job->steps + 1) * sizeof(int64_t));
    for (int pass = 0; pass < 2; pass++) { /* counts the spans of each length, then puts them in their places */
        for (int64_t row = from; row < to; row++)
            for (int64_t begin = 0, end; begin < job->steps; begin = end) {
                for (end = begin + 1; end < job->steps && !(split && is_reset(job, end, row));) end++;
                if (pass == 0) starts[end - begin]++;
                else out[starts[end - begin]++] = (Span){row, begin, end - begin, split && is_reset(job, begin, row)};
            }
        for (int64_t length = job->steps, before = 0; pass == 0 && length > 0; length--) {
            int64_t count = starts[length];
            starts[length] = before;
            before += count;
        }
    }
}

/* How many of a group's first `active` spans are longer than `step`. */
INLINE int64_t still_active(const Span *spans, int64_t active, int64_t step) {
    while (active > 0 && spans[active - 1].length <= step) active--;
    return active;
}

#endif
