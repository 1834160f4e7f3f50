/* Attention of a few query rows over the packed pages of a tier, on a CPU: what `operation.attend_pages` says, in one pass.

   A unit of work is a run of a row's pages and one KV head. It scores the run, takes the softmax of its scores and mixes its values; the
   parts of all runs are joined in their order. Runs depend on the row's tokens alone: neither other rows nor the number of threads change
   a bit. Nothing is as long as the row but the parts, a few numbers for each run. `pages_cpu.py` says what shapes are. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#ifdef __AVX512F__
#define NEAR 4  /* channel pairs of keys that are put together at once */
#else
#define NEAR 2
#endif
#define BATCH 2 /* vectors of tokens then */
#define STRIDE 64
#define RUN 512 /* slots of a run at most; of a short row half as many, so that there are several */
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

/* Keys or values. Channel c is field c / wide of word c % wide; a head with fewer words has no such channel. Of trellis-coded levels words
   tell numbers by those before them, so they are put down first, one for each channel (`put_down`). */
typedef struct {
    const int16_t *words;
    const int16_t *down;     /* numbers that were put down, those of the first page of a run; or NULL */
    const int32_t *begins;   /* the first word of each head in a row that all share, and the last one's end; or NULL */
    const uint16_t *numbers; /* parameters, scales before zero points: float16 */
    const uint16_t *scales;  /* of the channels of each page: float16, or NULL */
    const int16_t *sizes;    /* of the tokens, or NULL */
    Table scale, zero;       /* of codes without parameters, where these are fixed */
    int64_t page, head, word, field; /* strides of words; fields lie in the same word, but where numbers are put down */
    int64_t numbers_page, numbers_head, numbers_column;
    int64_t scales_page, scales_head, scales_channel;
    int64_t sizes_page, sizes_word;
    int32_t wide, channels, size_words, mode, groups, block, trellis, fields;
    int32_t widths[16]; /* of fields */
    int32_t masks[16];  /* of a field where it lies */
    float units[16];   /* 2^-(its first bit) */
} Stream;

/* Keys before RoPE, as `RopeTables` has them. */
typedef struct {
    const uint16_t *axes; /* float16 [heads][components][head_dim] */
    const float *size, *mean, *coarse, *fine;
    const float *middles; /* [components]: half the largest code */
    int32_t head_dim, pairs;
} Turn;

/* What makes a value of a mixture of codes: size back^T c + origin, of sized tokens size back^T c + origin s + mean. */
typedef struct {
    const uint16_t *back; /* float16 [heads][components][head_dim] */
    const float *size, *origin, *mean;
    int32_t head_dim;
} Fold;

typedef struct {
    const int32_t *table, *used;
    const float *query, *constant;
    int64_t table_row;
    int32_t rows, heads, page, width, mixes_keys, ahead;
    float softcap;
    float *top, *mass, *mixed, *mixed_keys, *ahead_scores; /* of so many keys `ahead`, behind the slots that are attended */
} Asked;

/* The pages of a run: their numbers, slots of each, and tokens of them all. */
typedef struct {
    const int32_t *pages;
    int count, page, tokens;
} Run;

/* e^x of -87 ... 88, less than 2 units in the last place off; below -87 what -87 gives. */
INLINE floats exp_of(floats x) {
    ints low = x < -87.0f;
    x = (floats)(((ints)x & ~low) | ((ints)((floats){0} - 87.0f) & low));
    floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is whole */
    floats whole = shifted - 12582912.0f;
    floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1;
    return (floats)((ints)sum + (__builtin_convertvector(whole, ints) << 23));
}

INLINE float largest_of(floats x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

/* The words of a page of a run, and how many a token has. */
static const int16_t *words_at(const Stream *stream, const Run *run, int number, int head, int *count) {
    *count = stream->begins ? stream->begins[head + 1] - stream->begins[head] : stream->wide;
    if (stream->down) return stream->down + number * run->page;
    int64_t own = stream->begins ? stream->begins[head] * stream->word : head * stream->head;
    return stream->words + run->pages[number] * stream->page + own;
}

/* Sizes of a page's tokens: 2^((i - 5) / 2), i four bits; head h in word h % words. */
INLINE void sizes_at(const Stream *stream, int page, int head, int tokens, float *out) {
    const int16_t *words = stream->sizes + page * stream->sizes_page + head % stream->size_words * stream->sizes_word;
    int first = 4 * (head / stream->size_words);
    for (int at = 0; at < tokens; at += LANES) {
        shorts found = {0};
        memcpy(&found, words + at, 2 * (size_t)(tokens - at < LANES ? tokens - at : LANES));
        ints number = __builtin_convertvector(found, ints) >> first & 15, odd = number & 1;
        floats power = (floats)(((number + odd) / 2 - 3 + 127) << 23);
        store(out + at, power * (1 + 0.41421354f * __builtin_convertvector(1 - odd, floats)), LANES);
    }
}

/* query [R][channels] times the codes of a page's channels [from, until): out [R] rows `stride` apart. */
INLINE void tile_products(const int R, const int V, const Stream *stream, const int16_t *words, int count, const float *query,
                          int from, int until, float *out, int stride, int left) {
    floats sums[MOST_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = (floats){0};
    for (int first = from / stream->wide * stream->wide; first < until; first += stream->wide) {
        int low = from > first ? from - first : 0, high = until - first < count ? until - first : count;
        int32_t mask = stream->masks[first / stream->wide];
        const int16_t *of_field = words + first / stream->wide * stream->field;
        for (int w = low; w < high; w++) {
            floats tile[VECTORS];
            for (int v = 0; v < V; v++) tile[v] = codes_at(of_field + w * stream->word + v * LANES, mask, left - v * LANES);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sums[r][v] += query[r * stream->channels + first + w] * tile[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * stride + v * LANES, sums[r][v], LANES);
}

INLINE void products(const int R, const Stream *stream, const int16_t *words, int count, const float *query, int from, int until,
                     float *out, int stride, int tokens) {
    const int V = R > 4 ? VECTORS / 2 : VECTORS;
    int at = 0;
    for (; at + V * LANES <= tokens; at += V * LANES)
        tile_products(R, V, stream, words + at, count, query, from, until, out + at, stride, V * LANES);
    for (; at + LANES <= tokens; at += LANES)
        tile_products(R, 1, stream, words + at, count, query, from, until, out + at, stride, LANES);
    if (at < tokens) tile_products(R, 1, stream, words + at, count, query, from, until, out + at, stride, tokens - at);
}

INLINE float number_of(const Table *table, int row, int head, int channel) {
    return table->numbers[row * table->row + head * table->head + channel * table->channel];
}

/* The query [R][channels] of an item as codes meet it, over the fields' units and times fixed scales, and what is added to its scores. */
INLINE void meet(const int R, const Stream *keys, const Asked *asked, int row, int head, const float *query, float *met, float *added) {
    int channels = keys->channels;
    const float *constant = asked->constant ? asked->constant + ((int64_t)row * asked->heads + head) * R : 0;
    for (int r = 0; r < R; r++) added[r] = constant ? constant[r] : 0;
    for (int c = 0; c < channels; c++) {
        float scale = keys->scale.numbers ? number_of(&keys->scale, row, head, c) : 1;
        float zero = keys->zero.numbers ? number_of(&keys->zero, row, head, c) : 0;
        for (int r = 0; r < R; r++) {
            met[r * channels + c] = query[r * channels + c] * scale * keys->units[c / keys->wide];
            added[r] += query[r * channels + c] * zero;
        }
    }
}

/* Scores of the first `tokens` of a page: `query [R][channels]` as it is, and as codes meet it (`meet`). */
INLINE void page_scores(const int R, const Stream *keys, const Run *run, int number, int head, const float *query, const float *met, int tokens,
                        float *out, int stride) {
    float folded[MOST_ROWS * MOST_CHANNELS], part[MOST_ROWS * (MOST_PAGE + LANES)];
    int channels = keys->channels, columns = keys->groups, page = run->pages[number], count;
    const int16_t *words = words_at(keys, run, number, head, &count);
    const uint16_t *numbers = keys->numbers + page * keys->numbers_page + head * keys->numbers_head;
    if (keys->mode == NONE) {
        products(R, keys, words, count, met, 0, channels, out, stride, tokens);
        return;
    }
    if (keys->mode == CHANNEL) {
        for (int at = 0; at < tokens; at += keys->block) {
            float start[MOST_ROWS] = {0};
            const uint16_t *own = numbers + at / keys->block;
            for (int c = 0; c < channels; c++) {
                int column = c / (channels / columns);
                float scale = of_half(own[column * keys->numbers_column]), zero = of_half(own[(columns + column) * keys->numbers_column]);
                for (int r = 0; r < R; r++) {
                    folded[r * channels + c] = met[r * channels + c] * scale;
                    start[r] += query[r * channels + c] * zero;
                }
            }
            int left = tokens - at < keys->block ? tokens - at : keys->block;
            products(R, keys, words + at, count, folded, 0, channels, out + at, stride, left);
            for (int r = 0; r < R; r++)
                for (int t = 0; t < left; t++) out[r * stride + at + t] += start[r];
        }
        return;
    }
    const uint16_t *scales = keys->scales ? keys->scales + page * keys->scales_page + head * keys->scales_head : 0;
    for (int g = 0; g < columns; g++) {
        int from = g * (channels / columns), until = from + channels / columns;
        float sums[MOST_ROWS] = {0};
        for (int c = from; c < until; c++) {
            float scale = scales ? of_half(scales[c * keys->scales_channel]) : 1;
            for (int r = 0; r < R; r++) {
                sums[r] += query[r * channels + c] * scale;
                folded[r * channels + c] = met[r * channels + c] * scale;
            }
        }
        products(R, keys, words, count, scales ? folded : met, from, until, part, MOST_PAGE + LANES, tokens);
        for (int at = 0; at < tokens; at += LANES) {
            floats scale = of_halves(numbers + g * keys->numbers_column + at, tokens - at);
            floats zero = of_halves(numbers + (columns + g) * keys->numbers_column + at, tokens - at);
            for (int r = 0; r < R; r++) {
                floats found = scale * load(part + r * (MOST_PAGE + LANES) + at, LANES) + zero * sums[r];
                store(out + r * stride + at, g ? load(out + r * stride + at, LANES) + found : found, LANES);
            }
        }
    }
}

/* Keys of codes: `matrix [components + more][head_dim]` times s c, then s where there are sizes, and 1; turned by their distance from
   where the query was turned back to, `cos` and `sin [pairs][STRIDE]`, and multiplied with `query [R][head_dim]`. */
INLINE void turned_tile(const int R, const Stream *keys, const Turn *turn, const int16_t *words, int count, const float *matrix,
                        const float *sizes, const float *query, const float *cos, const float *sin, float *out, int stride, int left) {
    static const int wide = BATCH * LANES;
    float tile[(MOST_CHANNELS + 2) * BATCH * LANES] __attribute__((aligned(64)));
    const float *axes[MOST_CHANNELS + 2]; /* what a step of each number moves the channels */
    int own = 0, dim = turn->head_dim, pairs = turn->pairs;
    floats size[BATCH];
    for (int v = 0; v < BATCH; v++) size[v] = sizes ? load(sizes + v * LANES, left - v * LANES) : (floats){0} + 1;
    for (int field = 0; field * keys->wide < keys->channels; field++)
        for (int w = 0; w < count; w++, own++) {
            axes[own] = matrix + ((int64_t)field * keys->wide + w) * dim;
            for (int v = 0; v < BATCH; v++) {
                const int16_t *word = words + field * keys->field + w * keys->word + v * LANES;
                int there = left - v * LANES < 0 ? 0 : left - v * LANES;
                floats code = codes_at(word, keys->masks[field], there >= LANES ? LANES : there) * keys->units[field];
                store(tile + own * wide + v * LANES, code * size[v], LANES);
            }
        }
    for (int more = keys->channels; more < keys->channels + (sizes ? 2 : 1); more++, own++) {
        axes[own] = matrix + (int64_t)more * dim;
        for (int v = 0; v < BATCH; v++)
            store(tile + own * wide + v * LANES, sizes && more == keys->channels ? size[v] : (floats){0} + 1, LANES);
    }
    floats found[MOST_ROWS][BATCH];
    for (int r = 0; r < R; r++)
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
                for (int r = 0; r < R; r++) found[r][v] += query[r * dim + p + a] * one + query[r * dim + pairs + p + a] * two;
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
            for (int r = 0; r < R; r++) found[r][v] += query[r * dim + p] * one + query[r * dim + pairs + p] * two;
        }
    for (int d = 2 * pairs; d < dim; d++)
        for (int v = 0; v < BATCH; v++) {
            floats channel = {0};
            for (int k = 0; k < own; k++) channel += axes[k][d] * load(tile + k * wide + v * LANES, LANES);
            for (int r = 0; r < R; r++) found[r][v] += query[r * dim + d] * channel;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < BATCH; v++) store(out + r * stride + v * LANES, found[r][v], LANES);
}

/* Scores of the first `tokens` of a page whose first slot is `slot` of its row. */
INLINE void turned_page(const int R, const Stream *keys, const Turn *turn, const Run *run, int number, int head, const float *matrix,
                        const float *angles, const float *query, int slot, int tokens, float *out, int stride) {
    float sizes[MOST_PAGE + LANES], asked[MOST_ROWS * MOST_CHANNELS];
    int count, dim = turn->head_dim, pairs = turn->pairs;
    const int16_t *words = words_at(keys, run, number, head, &count);
    if (keys->sizes) sizes_at(keys, run->pages[number], head, tokens, sizes);
    for (int at = 0; at < tokens; at += BATCH * LANES) {
        int here = (slot + at) % STRIDE;
        if (!at || !here) { /* the query turned back to where this stretch of positions begins */
            const float *cos = turn->coarse + (int64_t)((slot + at) / STRIDE) * 2 * pairs, *sin = cos + pairs;
            for (int r = 0; r < R; r++) {
                const float *from = query + r * dim;
                float *to = asked + r * dim;
                for (int p = 0; p < pairs; p++) {
                    to[p] = from[p] * cos[p] + from[pairs + p] * sin[p];
                    to[pairs + p] = from[pairs + p] * cos[p] - from[p] * sin[p];
                }
                for (int d = 2 * pairs; d < dim; d++) to[d] = from[d];
            }
        }
        turned_tile(R, keys, turn, words + at, count, matrix, keys->sizes ? sizes + at : 0, asked, angles + here,
                    angles + pairs * STRIDE + here, out + at, stride, tokens - at);
    }
}

/* `scores [R]` of a run, `stride` apart, become weights: e^(score - the largest), 0 behind the last token. */
INLINE void weigh(const int R, float *scores, int stride, int tokens, const float *constant, float softcap, float *top, float *mass) {
    int padded = (tokens + LANES - 1) / LANES * LANES;
    for (int r = 0; r < R; r++) {
        float *own = scores + r * stride;
        for (int t = tokens; t < padded; t++) own[t] = -1e38f;
        floats most = (floats){0} - 1e38f, sum = {0};
        for (int at = 0; at < padded; at += LANES) {
            floats score = load(own + at, LANES) + (constant ? constant[r] : 0);
            if (softcap > 0) { /* tanh x = 1 - 2 / (e^2x + 1) */
                floats twice = score * (2 / softcap);
                ints high = twice > 40.0f;
                twice = (floats)(((ints)twice & ~high) | ((ints)((floats){0} + 40.0f) & high));
                score = (1 - 2 / (exp_of(twice) + 1)) * softcap;
            }
            ints larger = score > most;
            if (at + LANES > tokens) /* slots behind the last token */
                for (int lane = 0; lane < LANES; lane++) larger[lane] &= at + lane < tokens ? -1 : 0;
            most = (floats)(((ints)score & larger) | ((ints)most & ~larger));
            store(own + at, score, LANES);
        }
        top[r] = largest_of(most);
        for (int at = 0; at < padded; at += LANES) {
            floats weight = exp_of(load(own + at, LANES) - top[r]);
            if (at + LANES > tokens)
                for (int lane = 0; lane < LANES; lane++) weight[lane] = at + lane < tokens ? weight[lane] : 0;
            store(own + at, weight, LANES);
            sum += weight;
        }
        mass[r] = sum_of(sum);
    }
}

/* Adds sum_t weight_t scale code_t of a channel, of one word and field, to `sums`. `scale` by blocks of `block` tokens of a page. */
INLINE void channel_mix(const int R, const int V, const Stream *stream, const Run *run, int head, int w, int field,
                        const float *weights, int stride, const float *scales, int block, int channels,
                        floats sums[MOST_ROWS][VECTORS]) {
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
                    for (int r = 0; r < R; r++) sums[r][v] += load(weights + r * stride + first + at + v * LANES, LANES) * tile;
                }
            for (; at < end; at += LANES) {
                floats tile = codes_at(words + at, mask, end - at);
                if (scales) tile *= scale;
                for (int r = 0; r < R; r++) sums[r][0] += load(weights + r * stride + first + at, LANES) * tile;
            }
        }
    }
}

/* mixed [R] rows `wide` apart = sum_t weight_t scale code_t of the channels [from, until). */
INLINE void codes_mix(const int R, const Stream *stream, const Run *run, int head, const float *weights, int stride, int from,
                      int until, const float *scales, int block, float *mixed, int wide) {
    const int V = R > 4 ? VECTORS / 2 : VECTORS;
    int count;
    words_at(stream, run, 0, head, &count);
    for (int first = from / stream->wide * stream->wide; first < until; first += stream->wide) {
        int low = from > first ? from - first : 0, high = until - first < stream->wide ? until - first : stream->wide;
        for (int w = low; w < high; w++) {
            floats sums[MOST_ROWS][VECTORS];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sums[r][v] = (floats){0};
            if (w < count)
                channel_mix(R, V, stream, run, head, w, first / stream->wide, weights, stride,
                            scales ? scales + first + w : 0, block, stream->channels, sums);
            for (int r = 0; r < R; r++) {
                floats sum = sums[r][0];
                for (int v = 1; v < V; v++) sum += sums[r][v];
                mixed[r * wide + first + w] = sum_of(sum) * stream->units[first / stream->wide];
            }
        }
    }
}

/* The weights of a run times the sizes of its tokens, and behind the channels of `mixed` their sums. */
INLINE void sized_mix(const int R, const Stream *stream, const Run *run, int head, const float *weights, int stride, float *room,
                      float *mixed, int wide) {
    float sizes[RUN + MOST_PAGE + LANES];
    for (int number = 0; number < run->count; number++) {
        int first = number * run->page, tokens = run->tokens - first < run->page ? run->tokens - first : run->page;
        sizes_at(stream, run->pages[number], head, tokens, sizes + first);
    }
    for (int r = 0; r < R; r++) {
        floats sum = {0};
        for (int at = 0; at < run->tokens; at += LANES) {
            floats sized = load(weights + r * stride + at, LANES) * load(sizes + at, run->tokens - at);
            store(room + r * stride + at, sized, LANES);
            sum += sized;
        }
        mixed[r * wide + stream->channels] = sum_of(sum);
    }
    codes_mix(R, stream, run, head, room, stride, 0, stream->channels, 0, run->page, mixed, wide);
}

/* Values of a run. */
INLINE void run_mix(const int R, const Stream *values, const Run *run, int head, const float *weights, int stride, float *room,
                    float *mixed, int wide) {
    int channels = values->channels, columns = values->groups, page = run->page;
    if (values->sizes) {
        sized_mix(R, values, run, head, weights, stride, room, mixed, wide);
        return;
    }
    if (values->mode == NONE) {
        codes_mix(R, values, run, head, weights, stride, 0, channels, 0, page, mixed, wide);
        return;
    }
    float scales[MOST_BLOCKS * MOST_CHANNELS], zeros[MOST_BLOCKS][MOST_ROWS];
    if (values->mode == CHANNEL) {
        int block = values->block, blocks = 0;
        for (int number = 0; number < run->count; number++)
            for (int at = 0; at < page && number * page + at < run->tokens; at += block, blocks++) {
                const uint16_t *own = values->numbers + run->pages[number] * values->numbers_page + head * values->numbers_head;
                for (int c = 0; c < channels; c++)
                    scales[blocks * channels + c] = of_half(own[at / block + c / (channels / columns) * values->numbers_column]);
            }
        codes_mix(R, values, run, head, weights, stride, 0, channels, scales, block, mixed, wide);
        blocks = 0;
        for (int number = 0; number < run->count; number++)
            for (int at = 0; at < page && number * page + at < run->tokens; at += block, blocks++) {
                const uint16_t *own = values->numbers + run->pages[number] * values->numbers_page + head * values->numbers_head;
                int first = number * page + at, stop = first + block < run->tokens ? first + block : run->tokens;
                for (int r = 0; r < R; r++) {
                    zeros[0][r] = 0;
                    for (int t = first; t < stop; t++) zeros[0][r] += weights[r * stride + t];
                }
                for (int c = 0; c < channels; c++) {
                    float zero = of_half(own[at / block + (columns + c / (channels / columns)) * values->numbers_column]);
                    for (int r = 0; r < R; r++) mixed[r * wide + c] += zeros[0][r] * zero;
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
            for (int r = 0; r < R; r++) {
                floats sum = {0};
                for (int at = 0; at < tokens; at += LANES) {
                    floats weight = load(weights + r * stride + first + at, tokens - at);
                    sum += weight * of_halves(zero + at, tokens - at);
                    store(room + r * stride + first + at, weight * of_halves(scale + at, tokens - at), LANES);
                }
                zeros[number][r] = sum_of(sum);
            }
        }
        codes_mix(R, values, run, head, room, stride, from, until, values->scales ? scales : 0, page, mixed, wide);
        for (int number = 0; number < run->count; number++)
            for (int r = 0; r < R; r++)
                for (int c = from; c < until; c++)
                    mixed[r * wide + c] += zeros[number][r] * (values->scales ? scales[number * channels + c] : 1);
    }
}

/* The numbers of the trellis-coded levels of a run's pages, [channels][RUN] with pages behind each other; u are the lowest bits of the
   components before. Returns the stream of these numbers. */
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

/* One run of a row's pages: the largest score, the mass and the mixture of each query row. */
INLINE void run_part(const int R, const Stream *keys, const Stream *values, int16_t *down, const Turn *turn, const Asked *asked, int row, int head,
                     int first, const float *matrix, const float *angles, Run run, float *part, int wide) {
    enum { ROOM = RUN + BATCH * LANES };
    float scores[MOST_ROWS * ROOM], room[MOST_ROWS * ROOM], met[MOST_ROWS * MOST_CHANNELS], added[MOST_ROWS];
    int dim = turn ? turn->head_dim : keys->channels;
    int64_t item = (int64_t)row * asked->heads + head;
    const float *query = asked->query + item * R * dim;
    Stream of_keys, of_values;
    if (keys->trellis) of_keys = put_down(keys, &run, head, down), keys = &of_keys;
    if (values->trellis) of_values = put_down(values, &run, head, down + (int64_t)keys->channels * RUN), values = &of_values;
    if (!turn) meet(R, keys, asked, row, head, query, met, added);
    for (int number = 0; number < run.count; number++) {
        int slot = number * run.page, tokens = run.tokens - slot < run.page ? run.tokens - slot : run.page;
        if (turn)
            turned_page(R, keys, turn, &run, number, head, matrix, angles, query, first + slot, tokens, scores + slot, ROOM);
        else
            page_scores(R, keys, &run, number, head, query, met, tokens, scores + slot, ROOM);
    }
    weigh(R, scores, ROOM, run.tokens, turn ? 0 : added, asked->softcap, part, part + R);
    float *mixed = part + 2 * R;
    run_mix(R, values, &run, head, scores, ROOM, room, mixed, wide);
    if (asked->mixes_keys) sized_mix(R, keys, &run, head, scores, ROOM, room, mixed + wide - keys->channels - 1, wide);
}

/* `matrix [heads][components + 1 or 2][head_dim]` of keys before RoPE, and their angles [2][pairs][STRIDE]. */
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

/* Scores of the keys ahead: those of every page or block that one of them lies in, of which they are kept. */
INLINE void scores_ahead(const int R, const Stream *keys, const Asked *asked, int row, int head) {
    enum { ROOM = MOST_PAGE + LANES };
    float scores[MOST_ROWS * ROOM], met[MOST_ROWS * MOST_CHANNELS], added[MOST_ROWS];
    int64_t item = (int64_t)row * asked->heads + head;
    int first = asked->used[row], last = first + asked->ahead;
    const float *query = asked->query + item * R * keys->channels;
    meet(R, keys, asked, row, head, query, met, added);
    for (int page = first / asked->page; page * asked->page < last; page++) {
        int slot = page * asked->page, tokens = last - slot < asked->page ? last - slot : asked->page;
        Run own = {asked->table + row * asked->table_row + page, 1, asked->page, tokens};
        page_scores(R, keys, &own, 0, head, query, met, tokens, scores, ROOM);
        for (int t = first > slot ? first - slot : 0; t < tokens; t++)
            for (int r = 0; r < R; r++)
                asked->ahead_scores[(item * R + r) * asked->ahead + slot + t - first] = scores[r * ROOM + t] + added[r];
    }
}

/* The parts of an item's runs as one, mixtures of components as channels where they are to be. */
static void join(const Stream *keys, const Stream *values, const Fold *fold, const Asked *asked, int R, int64_t item, const float *parts,
                 int runs, int64_t size, int wide) {
    int row = item / asked->heads, head = item % asked->heads, mixing = values->channels + (values->sizes ? 1 : 0), of_keys = asked->mixes_keys ? keys->channels + 1 : 0;
    int dim = fold ? fold->head_dim : values->channels;
    for (int r = 0; r < R; r++) {
        float top = -1e38f, mass = 0, mixed[2 * MOST_CHANNELS + 2] = {0};
        for (int run = 0; run < runs; run++) top = parts[run * size + r] > top ? parts[run * size + r] : top;
        for (int run = 0; run < runs; run++) {
            const float *part = parts + run * size;
            float share = expf(part[r] - top);
            mass += part[R + r] * share;
            for (int c = 0; c < wide; c++) mixed[c] += part[2 * R + r * wide + c] * share;
        }
        int64_t out = item * R + r;
        asked->top[out] = top, asked->mass[out] = mass;
        for (int c = 0; c < of_keys; c++) asked->mixed_keys[out * of_keys + c] = mixed[mixing + c];
        float *to = asked->mixed + out * dim;
        if (!fold) {
            float whole = values->sizes ? mixed[values->channels] : mass;
            for (int c = 0; c < values->channels; c++)
                to[c] = values->scale.numbers
                            ? mixed[c] * number_of(&values->scale, row, head, c) + whole * number_of(&values->zero, row, head, c)
                            : mixed[c];
            continue;
        }
        float moved[MOST_CHANNELS] = {0};
        for (int k = 0; k < values->channels; k++) {
            const uint16_t *axis = fold->back + ((int64_t)head * values->channels + k) * dim;
            for (int d = 0; d < dim; d++) moved[d] += mixed[k] * of_half(axis[d]);
        }
        const float *origin = fold->origin + (int64_t)head * dim, *mean = fold->mean ? fold->mean + (int64_t)head * dim : 0;
        for (int d = 0; d < dim; d++)
            to[d] = moved[d] * fold->size[head] + (mean ? (origin[d] - mean[d]) * mixed[values->channels] + mean[d] * mass : origin[d] * mass);
    }
}

/* Pages of a run of a row with so many tokens. */
static int pages_of(const Asked *asked, int used) {
    int pages = (used < SHORT ? RUN / 2 : RUN) / asked->page;
    return pages > 0 ? pages : 1;
}

/* See `Asked`; `turn` and `fold` may be NULL. Returns 0, or -1 where there is no memory. */
int attend_pages(const Stream *keys, const Stream *values, const Turn *turn, const Fold *fold, const Asked *asked, int R, int threads) {
    int least = pages_of(asked, 0), runs = (asked->width + least - 1) / least, items = asked->rows * asked->heads;
    int wide = values->channels + (values->sizes ? 1 : 0) + (asked->mixes_keys ? keys->channels + 1 : 0);
    int64_t size = (int64_t)R * (2 + wide);
    int dim = turn ? turn->head_dim : 0, columns = keys->channels + (keys->sizes ? 2 : 1);
    float *parts = malloc(sizeof(float) * ((int64_t)items * runs * size + (int64_t)asked->heads * columns * dim + (turn ? 2 * turn->pairs * STRIDE : 0)));
    if (!parts) return -1;
    float *matrices = parts + (int64_t)items * runs * size, *angles = matrices + (int64_t)asked->heads * columns * dim;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        int16_t *down = 0;
        if (keys->trellis || values->trellis) failed = !(down = malloc(2 * (int64_t)(keys->channels + values->channels) * RUN));
#pragma omp for schedule(static)
        for (int head = 0; head < (turn ? asked->heads : 0); head++)
            put_together(keys, turn, head, matrices + (int64_t)head * columns * dim, angles);
#pragma omp for schedule(dynamic)
        for (int unit = 0; unit < items * runs; unit++) {
            int item = unit / runs, row = item / asked->heads, head = item % asked->heads, pages = pages_of(asked, asked->used[row]);
            int page = unit % runs * pages, there = asked->width - page < pages ? asked->width - page : pages;
            int slots = asked->used[row] - page * asked->page, tokens = slots < there * asked->page ? slots : there * asked->page;
            float *part = parts + unit * size;
            if (tokens <= 0 || failed) {
                memset(part, 0, sizeof(float) * size);
                for (int r = 0; r < R; r++) part[r] = -1e38f;
                continue;
            }
            Run run = {asked->table + row * asked->table_row + page, (tokens + asked->page - 1) / asked->page, asked->page, tokens};
            BY_ROWS(R, run_part, keys, values, down, turn, asked, row, head, page * asked->page, matrices + (int64_t)head * columns * dim,
                    angles, run, part, wide)
        }
#pragma omp for schedule(static)
        for (int item = 0; item < (asked->ahead ? items : 0); item++)
            BY_ROWS(R, scores_ahead, keys, asked, item / asked->heads, item % asked->heads)
#pragma omp for schedule(static)
        for (int item = 0; item < items; item++) join(keys, values, fold, asked, R, item, parts + (int64_t)item * runs * size, runs, size, wide);
        free(down);
    }
    free(parts);
    return -failed;
}
