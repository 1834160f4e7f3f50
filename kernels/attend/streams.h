/* Keys and values in pages as `pages.c` meets them: where words, parameters and sizes lie, and what is asked of them. `pages_cpu.py`
   says what shapes are. */

#pragma once

#include "vectors.h"

#define STRIDE 64 /* positions that the same angles turn by, from where the query was turned back to */
#define RUN 512   /* slots of a run at most; of a short row half as many, so that there are several */
#define SHORT 2048
#define MOST_PAGE 512
#define MOST_BLOCKS 64 /* of a run: tokens that share parameters by channel */

enum { NONE, TOKEN, CHANNEL };

typedef int16_t pairs_of_shorts __attribute__((vector_size(4 * LANES)));

/* A number of each row, head and channel. */
typedef struct {
    const float *numbers;
    int64_t row, head, channel;
} Table;

/* Keys or values. Channel c is field c / wide of word c % wide; a head with fewer words has no such channel. Of trellis-coded levels
   words tell numbers by those before them, so they are put down first, one for each channel (`put_down`). */
typedef struct {
    const int16_t *words;
    const int16_t *down;     /* numbers that were put down, those of the first page of a run; or NULL */
    const int32_t *begins;   /* the first word of each head in a row that all share, and the last one's end; or NULL */
    const uint16_t *numbers; /* parameters, scales before zero points: float16 */
    const uint16_t *scales;  /* of the channels of each page: float16, or NULL */
    const void *sizes;       /* of the tokens, in words of `size_bytes` bytes, 1 or 2; or NULL */
    Table scale, zero;       /* of codes without parameters, where these are fixed */
    int64_t page, head, word, field; /* strides of words; fields lie in the same word, but where numbers are put down */
    int64_t numbers_page, numbers_head, numbers_column;
    int64_t scales_page, scales_head, scales_channel;
    int64_t sizes_page, sizes_word;
    int32_t wide, channels, size_words, size_bytes, mode, groups, block, trellis, fields;
    int32_t widths[16]; /* of fields */
    int32_t masks[16];  /* of a field where it lies */
    float units[16];   /* 2^-(its first bit) */
} Stream;

typedef struct {
    const int32_t *table, *used;
    const float *query, *constant;
    int64_t table_row;
    int32_t rows, heads, page, width, ahead;
    float softcap;
    float *top, *mass, *mixed, *ahead_scores; /* of so many keys `ahead`, behind the slots that are attended */
} Asked;

/* The pages of a run: their numbers, slots of each, and tokens of them all. */
typedef struct {
    const int32_t *pages;
    int count, page, tokens;
} Run;

/* The words of a page of a run, and how many a token has. */
static const int16_t *words_at(const Stream *stream, const Run *run, int number, int head, int *count) {
    *count = stream->begins ? stream->begins[head + 1] - stream->begins[head] : stream->wide;
    if (stream->down) return stream->down + number * run->page;
    int64_t own = stream->begins ? stream->begins[head] * stream->word : head * stream->head;
    return stream->words + run->pages[number] * stream->page + own;
}

/* Sizes of a page's tokens: 2^((i - 5) / 2), i four bits; head h in word h % words. */
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

/* The numbers of the trellis-coded levels of a run's pages, [channels][RUN] with pages behind each other; u are the lowest bits of
   the components before. Returns the stream of these numbers. */
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
