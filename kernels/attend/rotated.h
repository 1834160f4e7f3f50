/* Scores of keys before RoPE: keys of a few tokens at a time are rebuilt from codes, rotated and multiplied by the query while they
   are in registers. */

#pragma once

#include "streams.h"

#ifdef __AVX512F__
#define NEAR 4 /* channel pairs of keys that are rebuilt at once */
#else
#define NEAR 2
#endif
#define BATCH 2 /* vectors of tokens at once */

/* `RopeTables` of `packed_pages.py`. */
typedef struct {
    const uint16_t *axes; /* float16 [heads][components][head_dim] */
    const float *size, *mean, *coarse, *fine;
    const float *middles; /* [components]: half the largest code */
    int32_t head_dim, pairs;
} Turn;

/* Prepares `matrix [components + 1 or 2][head_dim]` of a head, which maps codes to keys before RoPE (`rotated_tile`); for head 0
   also `angles`, cos and sin of positions 0 ... STRIDE - 1, [2][pairs][STRIDE]. */
static void put_together(const Stream *keys, const Turn *turn, int head, float *matrix, float *angles) {
    int dim = turn->head_dim, components = keys->channels, pairs = turn->pairs;
    float *offset = matrix + (int64_t)components * dim, *last = offset + (keys->sizes ? dim : 0), size = turn->size[head];
    double middle[MOST_CHANNELS] = {0};
    for (int k = 0; k < components; k++) {
        const uint16_t *axis = turn->axes + ((int64_t)head * components + k) * dim;
        for (int d = 0; d < dim; d++) {
            matrix[(int64_t)k * dim + d] = of_half(axis[d]) * size;
            middle[d] -= (double)matrix[(int64_t)k * dim + d] * turn->middles[k];
        }
    }
    for (int d = 0; d < dim; d++) {
        last[d] = (float)(turn->mean[head * dim + d] + (keys->sizes ? 0 : middle[d]));
        if (keys->sizes) offset[d] = (float)middle[d];
    }
    for (int at = 0; at < 2 * pairs * STRIDE && !head; at++) angles[at] = turn->fine[at % STRIDE * 2 * pairs + at / STRIDE];
}

/* Scores of a tile: keys are `matrix [components + 1 or 2][head_dim]` times (s c, s, 1), or (c, 1) without sizes s. They are
   rotated by `cos` and `sin [pairs][STRIDE]` of their distance from the position that the query was rotated back to, and multiplied
   with `query [ROWS][head_dim]`. */
static void rotated_tile(const Stream *keys, const Turn *turn, const int16_t *words, int count, const float *matrix,
                        const float *sizes, const float *query, const float *cos, const float *sin, float *out, int stride,
                        int left) {
    static const int wide = BATCH * LANES;
    float tile[(MOST_CHANNELS + 2) * BATCH * LANES] __attribute__((aligned(64)));
    const float *axes[MOST_CHANNELS + 2]; /* matrix row of each number */
    int own = 0, dim = turn->head_dim, pairs = turn->pairs;
    int there[BATCH]; /* tokens of each vector */
    floats size[BATCH];
    for (int v = 0; v < BATCH; v++) {
        there[v] = left < v * LANES ? 0 : left < (v + 1) * LANES ? left - v * LANES : LANES;
        size[v] = sizes ? load(sizes + v * LANES, there[v]) : (floats){0} + 1;
    }
    for (int field = 0; field * keys->wide < keys->channels; field++)
        for (int w = 0; w < count; w++, own++) {
            axes[own] = matrix + ((int64_t)field * keys->wide + w) * dim;
            for (int v = 0; v < BATCH; v++) {
                const int16_t *word = words + field * keys->field + w * keys->word + v * LANES;
                floats code = codes_at(word, keys->masks[field], there[v]) * keys->units[field];
                store(tile + own * wide + v * LANES, code * size[v], LANES);
            }
        }
    for (int more = keys->channels; more < keys->channels + (sizes ? 2 : 1); more++, own++) {
        axes[own] = matrix + (int64_t)more * dim;
        for (int v = 0; v < BATCH; v++)
            store(tile + own * wide + v * LANES, sizes && more == keys->channels ? size[v] : (floats){0} + 1, LANES);
    }
    floats found[ROWS][BATCH];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < BATCH; v++) found[r][v] = (floats){0};
    int p = 0;
    for (; p + NEAR <= pairs; p += NEAR) {
        floats near[NEAR][BATCH] = {0}, far[NEAR][BATCH] = {0};
        for (int k = 0; k < own; k++) {
            const float *axis = axes[k] + p, *other = axis + pairs;
            floats number[BATCH];
            for (int v = 0; v < BATCH; v++) number[v] = load(tile + k * wide + v * LANES, LANES);
            for (int a = 0; a < NEAR; a++)
                for (int v = 0; v < BATCH; v++) {
                    near[a][v] += axis[a] * number[v];
                    far[a][v] += other[a] * number[v];
                }
        }
        for (int a = 0; a < NEAR; a++)
            for (int v = 0; v < BATCH; v++) {
                floats c = load(cos + (p + a) * STRIDE + v * LANES, LANES), s = load(sin + (p + a) * STRIDE + v * LANES, LANES);
                floats one = near[a][v] * c - far[a][v] * s, two = far[a][v] * c + near[a][v] * s;
                for (int r = 0; r < ROWS; r++) found[r][v] += query[r * dim + p + a] * one + query[r * dim + pairs + p + a] * two;
            }
    }
    for (; p < pairs; p++)
        for (int v = 0; v < BATCH; v++) {
            floats near = {0}, far = {0};
            for (int k = 0; k < own; k++) {
                floats number = load(tile + k * wide + v * LANES, LANES);
                near += axes[k][p] * number;
                far += axes[k][pairs + p] * number;
            }
            floats c = load(cos + p * STRIDE + v * LANES, LANES), s = load(sin + p * STRIDE + v * LANES, LANES);
            floats one = near * c - far * s, two = far * c + near * s;
            for (int r = 0; r < ROWS; r++) found[r][v] += query[r * dim + p] * one + query[r * dim + pairs + p] * two;
        }
    for (int d = 2 * pairs; d < dim; d++)
        for (int v = 0; v < BATCH; v++) {
            floats channel = {0};
            for (int k = 0; k < own; k++) channel += axes[k][d] * load(tile + k * wide + v * LANES, LANES);
            for (int r = 0; r < ROWS; r++) found[r][v] += query[r * dim + d] * channel;
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < BATCH; v++) store(out + r * stride + v * LANES, found[r][v], LANES);
}

/* Scores of the first `tokens` of a page whose first slot is `slot` of its row. */
static void rotated_page(const Stream *keys, const Turn *turn, const Run *run, int number, int head, const float *matrix,
                        const float *angles, const float *query, int slot, int tokens, float *out, int stride) {
    float sizes[MOST_PAGE + LANES], asked[ROWS * MOST_CHANNELS];
    int count, dim = turn->head_dim, pairs = turn->pairs;
    const int16_t *words = words_at(keys, run, number, head, &count);
    if (keys->sizes) sizes_at(keys, run->pages[number], head, tokens, sizes);
    for (int at = 0; at < tokens; at += BATCH * LANES) {
        int here = (slot + at) % STRIDE;
        if (!at || !here) { /* rotate the query back to the last multiple of STRIDE */
            const float *cos = turn->coarse + (int64_t)((slot + at) / STRIDE) * 2 * pairs, *sin = cos + pairs;
            for (int r = 0; r < ROWS; r++) {
                const float *from = query + r * dim;
                float *to = asked + r * dim;
                for (int p = 0; p < pairs; p++) {
                    to[p] = from[p] * cos[p] + from[pairs + p] * sin[p];
                    to[pairs + p] = from[pairs + p] * cos[p] - from[p] * sin[p];
                }
                for (int d = 2 * pairs; d < dim; d++) to[d] = from[d];
            }
        }
        rotated_tile(keys, turn, words + at, count, matrix, keys->sizes ? sizes + at : 0, asked, angles + here,
                    angles + pairs * STRIDE + here, out + at, stride, tokens - at);
    }
}
