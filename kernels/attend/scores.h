/* Scores of a page's keys from their codes: scales are multiplied into the query or into the scores of tokens. */

#pragma once

#include "streams.h"

/* Products of query [ROWS][channels] with the codes of the channels [from, until), for V vectors of tokens: ROWS rows of `out`,
   `stride` apart. */
INLINE void tile_products(const int V, const Stream *stream, const int16_t *words, int count, const float *query,
                          int from, int until, float *out, int stride, int left) {
    floats sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) sums[r][v] = (floats){0};
    for (int first = from / stream->wide * stream->wide; first < until; first += stream->wide) {
        int low = from > first ? from - first : 0, high = until - first < count ? until - first : count;
        int32_t mask = stream->masks[first / stream->wide];
        const int16_t *of_field = words + first / stream->wide * stream->field;
        for (int w = low; w < high; w++) {
            floats tile[VECTORS];
            for (int v = 0; v < V; v++) tile[v] = codes_at(of_field + w * stream->word + v * LANES, mask, left - v * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < V; v++) sums[r][v] += query[r * stream->channels + first + w] * tile[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) store(out + r * stride + v * LANES, sums[r][v], LANES);
}

static void products(const Stream *stream, const int16_t *words, int count, const float *query, int from, int until,
                     float *out, int stride, int tokens) {
    const int V = ROWS > 4 ? VECTORS / 2 : VECTORS;
    int at = 0;
    for (; at + V * LANES <= tokens; at += V * LANES)
        tile_products(V, stream, words + at, count, query, from, until, out + at, stride, V * LANES);
    for (; at + LANES <= tokens; at += LANES)
        tile_products(1, stream, words + at, count, query, from, until, out + at, stride, LANES);
    if (at < tokens) tile_products(1, stream, words + at, count, query, from, until, out + at, stride, tokens - at);
}

INLINE float number_of(const Table *table, int row, int head, int channel) {
    return table->numbers[row * table->row + head * table->head + channel * table->channel];
}

/* Prepares the query [ROWS][channels] of an item for products with codes: `met` = query * fixed scale * unit of the field, and
   `added [ROWS]` = constant + query . fixed zero points, which is added to the scores. */
static void meet(const Stream *keys, const Asked *asked, int row, int head, const float *query, float *met,
                 float *added) {
    int channels = keys->channels;
    const float *constant = asked->constant ? asked->constant + ((int64_t)row * asked->heads + head) * ROWS : 0;
    for (int r = 0; r < ROWS; r++) added[r] = constant ? constant[r] : 0;
    for (int c = 0; c < channels; c++) {
        float scale = keys->scale.numbers ? number_of(&keys->scale, row, head, c) : 1;
        float zero = keys->zero.numbers ? number_of(&keys->zero, row, head, c) : 0;
        for (int r = 0; r < ROWS; r++) {
            met[r * channels + c] = query[r * channels + c] * scale * keys->units[c / keys->wide];
            added[r] += query[r * channels + c] * zero;
        }
    }
}

/* Scores of the first `tokens` of a page, from `query [ROWS][channels]` and from `met`, the query that `meet` prepared. */
static void page_scores(const Stream *keys, const Run *run, int number, int head, const float *query,
                        const float *met, int tokens,
                        float *out, int stride) {
    float folded[ROWS * MOST_CHANNELS], part[ROWS * (MOST_PAGE + LANES)];
    int channels = keys->channels, columns = keys->groups, page = run->pages[number], count;
    const int16_t *words = words_at(keys, run, number, head, &count);
    const uint16_t *numbers = keys->numbers + page * keys->numbers_page + head * keys->numbers_head;
    if (keys->mode == NONE) {
        products(keys, words, count, met, 0, channels, out, stride, tokens);
        return;
    }
    if (keys->mode == CHANNEL) {
        for (int at = 0; at < tokens; at += keys->block) {
            float start[ROWS] = {0};
            const uint16_t *own = numbers + at / keys->block;
            for (int c = 0; c < channels; c++) {
                int column = c / (channels / columns);
                float scale = of_half(own[column * keys->numbers_column]);
                float zero = of_half(own[(columns + column) * keys->numbers_column]);
                for (int r = 0; r < ROWS; r++) {
                    folded[r * channels + c] = met[r * channels + c] * scale;
                    start[r] += query[r * channels + c] * zero;
                }
            }
            int left = tokens - at < keys->block ? tokens - at : keys->block;
            products(keys, words + at, count, folded, 0, channels, out + at, stride, left);
            for (int r = 0; r < ROWS; r++)
                for (int t = 0; t < left; t++) out[r * stride + at + t] += start[r];
        }
        return;
    }
    const uint16_t *scales = keys->scales ? keys->scales + page * keys->scales_page + head * keys->scales_head : 0;
    for (int g = 0; g < columns; g++) {
        int from = g * (channels / columns), until = from + channels / columns;
        float sums[ROWS] = {0};
        for (int c = from; c < until; c++) {
            float scale = scales ? of_half(scales[c * keys->scales_channel]) : 1;
            for (int r = 0; r < ROWS; r++) {
                sums[r] += query[r * channels + c] * scale;
                folded[r * channels + c] = met[r * channels + c] * scale;
            }
        }
        products(keys, words, count, scales ? folded : met, from, until, part, MOST_PAGE + LANES, tokens);
        for (int at = 0; at < tokens; at += LANES) {
            floats scale = of_halves(numbers + g * keys->numbers_column + at, tokens - at);
            floats zero = of_halves(numbers + (columns + g) * keys->numbers_column + at, tokens - at);
            for (int r = 0; r < ROWS; r++) {
                floats found = scale * load(part + r * (MOST_PAGE + LANES) + at, LANES) + zero * sums[r];
                store(out + r * stride + at, g ? load(out + r * stride + at, LANES) + found : found, LANES);
            }
        }
    }
}
