/* Structs of `pages.c`: keys and values in pages with their strides, and the arguments of a call. `pages_cpu.py` documents the
   shapes. */

#pragma once

#include "vectors.h"

#define STRIDE 64 /* positions that share a table of angles: the query is rotated back to the first of them */
#define RUN 512   /* most slots of a run; half as many in a short row, so that it has several runs */
#define SHORT 2048
#define MOST_PAGE 512
#define MOST_BLOCKS 64 /* most blocks of a run (tokens that share parameters per channel) */

enum { NONE, TOKEN, CHANNEL };

typedef int16_t pairs_of_shorts __attribute__((vector_size(4 * LANES)));

/* A number per row, head and channel, with strides. */
typedef struct {
    const float *numbers;
    int64_t row, head, channel;
} Table;

/* Keys or values. Channel c is field c / wide of word c % wide; a head with fewer words lacks the channels of the missing ones.
   Trellis-coded levels depend on the words before, so they are first decoded to one number per channel (`put_down`). */
typedef struct {
    const int16_t *words;
    const int16_t *down;     /* decoded trellis levels of a run, from its first page on; or NULL */
    const int32_t *begins;   /* first word of each head where all heads share a row, then the end of the last; or NULL */
    const uint16_t *numbers; /* parameters, scales before zero points: float16 */
    const uint16_t *scales;  /* scales of the channels of each page: float16, or NULL */
    const void *sizes;       /* sizes of the tokens, in words of `size_bytes` bytes, 1 or 2; or NULL */
    Table scale, zero;       /* fixed scales and zero points of codes without parameters */
    int64_t page, head, word, field; /* strides of words; `field` is 0 unless levels were decoded (`down`) */
    int64_t numbers_page, numbers_head, numbers_column;
    int64_t scales_page, scales_head, scales_channel;
    int64_t sizes_page, sizes_word;
    int32_t wide, channels, size_words, size_bytes, mode, groups, block, trellis, fields;
    int32_t widths[16]; /* bits of each field */
    int32_t masks[16];  /* of each field, not shifted */
    float units[16];   /* 2^-(first bit) of each field */
} Stream;

typedef struct {
    const int32_t *table, *used;
    const float *query, *constant;
    int64_t table_row;
    int32_t rows, heads, page, width, ahead;
    float softcap;
    float *top, *mass, *mixed, *ahead_scores; /* the last: scores of `ahead` keys behind the attended slots */
} Asked;

/* A run: its page numbers, how many pages, slots per page, and tokens in all. */
typedef struct {
    const int32_t *pages;
    int count, page, tokens;
} Run;

/* The words of the `number`-th page of a run; `*count` becomes the number of words that the head has of a token. */
static const int16_t *words_at(const Stream *stream, const Run *run, int number, int head, int *count) {
    *count = stream->begins ? stream->begins[head + 1] - stream->begins[head] : stream->wide;
    if (stream->down) return stream->down + number * run->page;
    int64_t own = stream->begins ? stream->begins[head] * stream->word : head * stream->head;
    return stream->words + run->pages[number] * stream->page + own;
}

/* Sizes 2^((i - 5) / 2) of a page's tokens, i a field of four bits; that of head h is in word h % size_words. */
static void sizes_at(const Stream *stream, int page, int head, int tokens, float *out) {
    int64_t own = page * stream->sizes_page + head % stream->size_words * stream->sizes_word;
    int first = 4 * (head / stream->size_words);
    for (int at = 0; at < tokens; at += LANES) {
        size_t count = tokens - at < LANES ? tokens - at : LANES;
        ints words;
        if (stream->size_bytes == 1) {
            bytes found = {0};
            memcpy(&found, (const uint8_t *)stream->sizes + own + at, count);
            words = __builtin_convertvector(found, ints);
        } else {
            shorts found = {0};
            memcpy(&found, (const int16_t *)stream->sizes + own + at, 2 * count);
            words = __builtin_convertvector(found, ints);
        }
        ints number = words >> first & 15, odd = number & 1;
        floats power = (floats)(((number + odd) / 2 - 3 + 127) << 23);
        store(out + at, power * (1 + 0.41421354f * __builtin_convertvector(1 - odd, floats)), LANES);
    }
}

/* Decodes the trellis-coded levels of a run to `numbers [channels][RUN]`, page after page, and returns a stream of these numbers. u
   is the lowest bit of a field; a level depends on those of the three components before. */
static Stream put_down(const Stream *stream, const Run *run, int head, int16_t *numbers) {
    Stream found = *stream;
    for (int number = 0; number < run->count; number++) {
        int count, tokens = run->tokens - number * run->page < run->page ? run->tokens - number * run->page : run->page;
        const int16_t *words = words_at(stream, run, number, head, &count);
        for (int at = 0; at < tokens; at += 2 * LANES) {
            size_t bytes = 2 * (size_t)(tokens - at < 2 * LANES ? tokens - at : 2 * LANES);
            pairs_of_shorts before = {0}, second = {0}, third = {0};
            for (int w = 0; w < count; w++) {
                pairs_of_shorts word = {0};
                memcpy(&word, words + w * stream->word + at, bytes);
                for (int field = 0, first = 0; field < stream->fields; first += stream->widths[field++]) {
                    pairs_of_shorts code = (word >> (int16_t)first) & (int16_t)((1 << stream->widths[field]) - 1), u = code & 1;
                    pairs_of_shorts level = ((code >> 1) << 2) | ((u ^ before ^ third) << 1) | second;
                    memcpy(numbers + ((int64_t)field * stream->wide + w) * RUN + number * run->page + at, &level, bytes);
                    third = second, second = before, before = u;
                }
            }
        }
    }
    found.down = numbers, found.word = RUN, found.field = (int64_t)stream->wide * RUN;
    for (int field = 0; field < stream->fields; field++) found.masks[field] = -1, found.units[field] = 1;
    return found;
}
