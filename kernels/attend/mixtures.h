/* Mixtures: sums over the tokens of a run of weights times values. */

#pragma once

#include "streams.h"

/* Adds sum_t weight_t scale code_t of one channel (one field of one word) to `sums`; scales are per block of `block` tokens. */
INLINE void channel_mix(const int V, const Stream *stream, const Run *run, int head, int w, int field,
                        const float *weights, int stride, const float *scales, int block, int channels,
                        floats sums[ROWS][VECTORS]) {
    int32_t mask = stream->masks[field];
    for (int number = 0; number < run->count; number++) {
        int count, first = number * run->page, tokens = run->tokens - first < run->page ? run->tokens - first : run->page;
        const int16_t *words = words_at(stream, run, number, head, &count) + field * stream->field + w * stream->word;
        for (int begin = 0; begin < tokens; begin += block, scales += scales ? channels : 0) {
            int end = begin + block < tokens ? begin + block : tokens, at = begin;
            float scale = scales ? *scales : 1;
            for (; at + V * LANES <= end; at += V * LANES)
                for (int v = 0; v < V; v++) {
                    floats tile = codes_at(words + at + v * LANES, mask, LANES);
                    if (scales) tile *= scale;
                    for (int r = 0; r < ROWS; r++) sums[r][v] += load(weights + r * stride + first + at + v * LANES, LANES) * tile;
                }
            for (; at < end; at += LANES) {
                floats tile = codes_at(words + at, mask, end - at);
                if (scales) tile *= scale;
                for (int r = 0; r < ROWS; r++) sums[r][0] += load(weights + r * stride + first + at, LANES) * tile;
            }
        }
    }
}

/* mixed = sum_t weight_t scale code_t for the channels [from, until), ROWS rows `wide` apart. */
static void codes_mix(const Stream *stream, const Run *run, int head, const float *weights, int stride, int from,
                      int until, const float *scales, int block, float *mixed, int wide) {
    const int V = ROWS > 4 ? VECTORS / 2 : VECTORS;
    int count;
    words_at(stream, run, 0, head, &count);
    for (int first = from / stream->wide * stream->wide; first < until; first += stream->wide) {
        int low = from > first ? from - first : 0, high = until - first < stream->wide ? until - first : stream->wide;
        for (int w = low; w < high; w++) {
            floats sums[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < V; v++) sums[r][v] = (floats){0};
            if (w < count)
                channel_mix(V, stream, run, head, w, first / stream->wide, weights, stride,
                            scales ? scales + first + w : 0, block, stream->channels, sums);
            for (int r = 0; r < ROWS; r++) {
                floats sum = sums[r][0];
                for (int v = 1; v < V; v++) sum += sums[r][v];
                mixed[r * wide + first + w] = sum_of(sum) * stream->units[first / stream->wide];
            }
        }
    }
}

/* Mixture of codes of tokens with sizes: weights are multiplied by sizes; their sum goes behind the channels of `mixed`. */
static void sized_mix(const Stream *stream, const Run *run, int head, const float *weights, int stride, float *room,
                      float *mixed, int wide) {
    float sizes[RUN + MOST_PAGE + LANES];
    for (int number = 0; number < run->count; number++) {
        int first = number * run->page, tokens = run->tokens - first < run->page ? run->tokens - first : run->page;
        sizes_at(stream, run->pages[number], head, tokens, sizes + first);
    }
    for (int r = 0; r < ROWS; r++) {
        floats sum = {0};
        for (int at = 0; at < run->tokens; at += LANES) {
            floats sized = load(weights + r * stride + at, LANES) * load(sizes + at, run->tokens - at);
            store(room + r * stride + at, sized, LANES);
            sum += sized;
        }
        mixed[r * wide + stream->channels] = sum_of(sum);
    }
    codes_mix(stream, run, head, room, stride, 0, stream->channels, 0, run->page, mixed, wide);
}

/* Mixture of the values of a run, in any mode of parameters. */
static void run_mix(const Stream *values, const Run *run, int head, const float *weights, int stride, float *room,
                    float *mixed, int wide) {
    int channels = values->channels, columns = values->groups, page = run->page;
    if (values->sizes) {
        sized_mix(values, run, head, weights, stride, room, mixed, wide);
        return;
    }
    if (values->mode == NONE) {
        codes_mix(values, run, head, weights, stride, 0, channels, 0, page, mixed, wide);
        return;
    }
    float scales[MOST_BLOCKS * MOST_CHANNELS], zeros[MOST_BLOCKS][ROWS];
    if (values->mode == CHANNEL) {
        int block = values->block, blocks = 0;
        for (int number = 0; number < run->count; number++)
            for (int at = 0; at < page && number * page + at < run->tokens; at += block, blocks++) {
                const uint16_t *own = values->numbers + run->pages[number] * values->numbers_page + head * values->numbers_head;
                for (int c = 0; c < channels; c++)
                    scales[blocks * channels + c] = of_half(own[at / block + c / (channels / columns) * values->numbers_column]);
            }
        codes_mix(values, run, head, weights, stride, 0, channels, scales, block, mixed, wide);
        blocks = 0;
        for (int number = 0; number < run->count; number++)
            for (int at = 0; at < page && number * page + at < run->tokens; at += block, blocks++) {
                const uint16_t *own = values->numbers + run->pages[number] * values->numbers_page + head * values->numbers_head;
                int first = number * page + at, stop = first + block < run->tokens ? first + block : run->tokens;
                for (int r = 0; r < ROWS; r++) {
                    zeros[0][r] = 0;
                    for (int t = first; t < stop; t++) zeros[0][r] += weights[r * stride + t];
                }
                for (int c = 0; c < channels; c++) {
                    float zero = of_half(own[at / block + (columns + c / (channels / columns)) * values->numbers_column]);
                    for (int r = 0; r < ROWS; r++) mixed[r * wide + c] += zeros[0][r] * zero;
                }
            }
        return;
    }
    for (int number = 0; number < run->count && values->scales; number++) {
        const uint16_t *own = values->scales + run->pages[number] * values->scales_page + head * values->scales_head;
        for (int c = 0; c < channels; c++) scales[number * channels + c] = of_half(own[c * values->scales_channel]);
    }
    for (int g = 0; g < columns; g++) {
        int from = g * (channels / columns), until = from + channels / columns;
        for (int number = 0; number < run->count; number++) {
            int first = number * page, tokens = run->tokens - first < page ? run->tokens - first : page;
            const uint16_t *own = values->numbers + run->pages[number] * values->numbers_page + head * values->numbers_head;
            const uint16_t *scale = own + g * values->numbers_column, *zero = own + (columns + g) * values->numbers_column;
            for (int r = 0; r < ROWS; r++) {
                floats sum = {0};
                for (int at = 0; at < tokens; at += LANES) {
                    floats weight = load(weights + r * stride + first + at, tokens - at);
                    sum += weight * of_halves(zero + at, tokens - at);
                    store(room + r * stride + first + at, weight * of_halves(scale + at, tokens - at), LANES);
                }
                zeros[number][r] = sum_of(sum);
            }
        }
        codes_mix(values, run, head, room, stride, from, until, values->scales ? scales : 0, page, mixed, wide);
        for (int number = 0; number < run->count; number++)
            for (int r = 0; r < ROWS; r++)
                for (int c = from; c < until; c++)
                    mixed[r * wide + c] += zeros[number][r] * (values->scales ? scales[number * channels + c] : 1);
    }
}
