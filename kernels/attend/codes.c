/* Products of queries or weights with packed codes on a CPU, in one pass over the words; `reference.py` has them in plain torch.

   `cpu.py` documents the shapes. ROWS is the number of query rows of a KV head. */

#include "vectors.h"

#ifdef __AVX512F__
#define AXES 8      /* channels of keys that are rebuilt at once */
#define BATCH 2     /* vectors of tokens at once */
#else
#define AXES 4
#define BATCH 3
#endif
#define CHUNK 256   /* tokens of one unit of work */

/* Packed codes of `items` = batch rows x heads. Channel c is field c / wide of word c % wide; a head with fewer words lacks the
   channels of the missing ones. */
typedef struct {
    const int16_t *words;
    const int32_t *begins; /* first word of each head where all heads share a row, then the end of the last; or NULL */
    int64_t row_stride, head_stride, word_stride;
    int32_t items, heads, wide, channels, tokens;
    int32_t masks[16]; /* of each field, not shifted */
    float units[16];   /* 2^-(first bit) of each field */
} Codes;

static const int16_t *words_of(const Codes *codes, int item, int *count) {
    int row = item / codes->heads, head = item % codes->heads;
    const int16_t *words = codes->words + row * codes->row_stride;
    *count = codes->begins ? codes->begins[head + 1] - codes->begins[head] : codes->wide;
    return words + (codes->begins ? codes->begins[head] * codes->word_stride : head * codes->head_stride);
}

/* Scores of `V` vectors of tokens with the channels [from, until) of `query [ROWS][channels]`. `left` tokens are stored; `room`
   tokens may be read. */
INLINE void scores_tile(const int V, const Codes *codes, const int16_t *words, int count, const float *query,
                        const float *start, int from, int until, float *out, int left, int room) {
    floats sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) sums[r][v] = (floats){0} + start[r];
    for (int first = from / codes->wide * codes->wide; first < until; first += codes->wide) {
        int low = from > first ? from - first : 0, high = until - first < count ? until - first : count;
        int32_t mask = codes->masks[first / codes->wide];
        for (int w = low; w < high; w++) {
            floats tile[VECTORS];
            for (int v = 0; v < V; v++) tile[v] = codes_at(words + w * codes->word_stride + v * LANES, mask, room - v * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < V; v++) sums[r][v] += query[r * codes->channels + first + w] * tile[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) store(out + (int64_t)r * codes->tokens + v * LANES, sums[r][v], left - v * LANES);
}

/* Scores of the tokens [at, stop) of an item, one group of channels after the other. */
static void scores_unit(const Codes *codes, int item, int groups, int block, const float *query, const float *scales,
                        const float *start, float *out, int at, int stop) {
    float asked[ROWS * MOST_CHANNELS], folded[ROWS * MOST_CHANNELS], begin[ROWS] = {0};
    int channels = codes->channels, tokens = codes->tokens, blocks = tokens / block, done = -1, count;
    const int16_t *words = words_of(codes, item, &count);
    const int V = ROWS > 4 ? VECTORS / 2 : VECTORS;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < channels; c++)
            asked[r * channels + c] = query[((int64_t)item * ROWS + r) * channels + c] * codes->units[c / codes->wide];
    while (at < stop) {
        int own = at / block, end = (own + 1) * block < stop ? (own + 1) * block : stop;
        if (own != done) {
            const float *scale = scales + ((int64_t)item * blocks + own) * channels;
            for (int r = 0; r < ROWS; r++) {
                begin[r] = start ? start[((int64_t)item * ROWS + r) * blocks + own] : 0;
                for (int c = 0; c < channels && scales; c++) folded[r * channels + c] = asked[r * channels + c] * scale[c];
            }
            done = own;
        }
        const float *taken = scales ? folded : asked;
        int vectors = end - at >= V * LANES ? V : end - at >= 2 * LANES ? 2 : 1, room = tokens - at;
        for (int g = 0; g < groups; g++) {
            float *to = out + ((int64_t)item * groups + g) * ROWS * tokens + at;
            int from = g * (channels / groups), until = from + channels / groups;
            if (vectors == V)
                scores_tile(V, codes, words + at, count, taken, begin, from, until, to, V * LANES, V * LANES);
            else if (vectors == 2)
                scores_tile(2, codes, words + at, count, taken, begin, from, until, to, 2 * LANES, 2 * LANES);
            else if (room >= LANES)
                scores_tile(1, codes, words + at, count, taken, begin, from, until, to, end - at, LANES);
            else
                scores_tile(1, codes, words + at, count, taken, begin, from, until, to, end - at, room);
        }
        at += vectors * LANES < end - at ? vectors * LANES : end - at;
    }
}

/* Ones, then zeros: MASK + LANES - n points to n ones followed by zeros. */
static const float MASK[2 * LANES] = {[0 ... LANES - 1] = 1};

/* Adds sum_t weight_t scale code_t of a channel to `sums`: `weights` are ROWS rows of `tokens`, `scales` are per block. */
INLINE void mixture(const int V, const Codes *codes, const int16_t *words, int32_t mask, const float *weights,
                    const float *scales, int block, floats sums[ROWS][VECTORS]) {
    int tokens = codes->tokens;
    for (int begin = 0; begin < tokens; begin += block) {
        int end = begin + block < tokens ? begin + block : tokens;
        float scale = scales ? scales[(int64_t)(begin / block) * codes->channels] : 1;
        int at = begin;
        for (; at + V * LANES <= end; at += V * LANES)
            for (int v = 0; v < V; v++) {
                floats tile = codes_at(words + at + v * LANES, mask, LANES) * scale;
                for (int r = 0; r < ROWS; r++) sums[r][v] += load(weights + (int64_t)r * tokens + at + v * LANES, LANES) * tile;
            }
        for (; at + LANES <= end || (at < end && at + LANES <= tokens); at += LANES) {
            floats tile = codes_at(words + at, mask, LANES) * scale;
            if (end - at < LANES) tile *= load(MASK + LANES - (end - at), LANES);
            for (int r = 0; r < ROWS; r++) sums[r][0] += load(weights + (int64_t)r * tokens + at, LANES) * tile;
        }
        if (at < end) {
            floats tile = codes_at(words + at, mask, end - at) * scale;
            for (int r = 0; r < ROWS; r++) sums[r][0] += load(weights + (int64_t)r * tokens + at, end - at) * tile;
        }
    }
}

/* Mixtures of the channels whose codes are in word `w`, of an item. */
static void mix_unit(const Codes *codes, int item, int w, int groups, int block, const float *weights,
                     const float *scales, float *out) {
    int channels = codes->channels, blocks = codes->tokens / block, count;
    const int16_t *words = words_of(codes, item, &count);
    const int V = ROWS > 4 ? VECTORS / 2 : VECTORS;
    for (int field = 0, c = w; c < channels; field++, c += codes->wide) {
        floats sums[ROWS][VECTORS] = {0};
        const float *own = weights + ((int64_t)item * groups + c / (channels / groups)) * ROWS * codes->tokens;
        const float *scale = scales ? scales + (int64_t)item * blocks * channels + c : 0;
        if (w < count) mixture(V, codes, words + w * codes->word_stride, codes->masks[field], own, scale, block, sums);
        for (int r = 0; r < ROWS; r++) {
            floats sum = sums[r][0];
            for (int v = 1; v < V; v++) sum += sums[r][v];
            out[((int64_t)item * ROWS + r) * channels + c] = sum_of(sum) * codes->units[field];
        }
    }
}

/* Scores with keys before RoPE: rebuilds a tile of keys as numbers times `matrix [columns][head_dim]`, where the numbers of a token
   are its codes times its size, then the size if there are sizes, then 1. Rotates the keys by `cos` and `sin [pairs][tokens]` and
   multiplies them with `query [ROWS][head_dim]`. */
static void rotated_tile(const Codes *codes, const int16_t *words, int count, const float *matrix, int columns,
                        const float *sizes, const float *query, int head_dim, int pairs, const float *cos, const float *sin,
                        float *out, int left) {
    static const int wide = BATCH * LANES;
    float tile[(MOST_CHANNELS + 2) * BATCH * LANES] __attribute__((aligned(64)));
    float keys[MOST_CHANNELS * BATCH * LANES] __attribute__((aligned(64)));
    const float *axes[MOST_CHANNELS + 2]; /* matrix row of each number */
    int own = 0;
    for (int field = 0; field * codes->wide < codes->channels; field++)
        for (int w = 0; w < count; w++) axes[own++] = matrix + ((int64_t)field * codes->wide + w) * head_dim;
    for (int more = codes->channels; more < columns; more++) axes[own++] = matrix + (int64_t)more * head_dim;
    for (int v = 0; v < BATCH; v++) {
        floats size = sizes && left > v * LANES ? load(sizes + v * LANES, left - v * LANES) : (floats){0} + 1;
        float *to = tile + v * LANES;
        for (int field = 0; field * codes->wide < codes->channels; field++)
            for (int w = 0; w < count; w++, to += wide) {
                const int16_t *word = words + w * codes->word_stride + v * LANES;
                floats code = left >= (v + 1) * LANES ? codes_at(word, codes->masks[field], LANES)
                              : left > v * LANES      ? codes_at(word, codes->masks[field], left - v * LANES)
                                                      : (floats){0};
                store(to, code * codes->units[field] * size, LANES);
            }
        if (sizes) store(to, size, LANES), to += wide;
        store(to, (floats){0} + 1, LANES);
    }
    for (int d = 0; d < head_dim; d += AXES) {
        floats sums[AXES][BATCH] = {0};
        for (int k = 0; k < own; k++) {
            const float *axis = axes[k] + d;
            floats number[BATCH];
            for (int v = 0; v < BATCH; v++) number[v] = load(tile + k * wide + v * LANES, LANES);
            for (int a = 0; a < AXES; a++)
                for (int v = 0; v < BATCH; v++) sums[a][v] += axis[a] * number[v];
        }
        for (int a = 0; a < AXES; a++)
            for (int v = 0; v < BATCH; v++) store(keys + (d + a) * wide + v * LANES, sums[a][v], LANES);
    }
    for (int v = 0; v < BATCH && left > v * LANES; v++) {
        floats sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = (floats){0};
        for (int p = 0; p < pairs; p++) {
            floats near = load(keys + p * wide + v * LANES, LANES), far = load(keys + (pairs + p) * wide + v * LANES, LANES);
            floats c = load(cos + (int64_t)p * codes->tokens + v * LANES, left - v * LANES);
            floats s = load(sin + (int64_t)p * codes->tokens + v * LANES, left - v * LANES);
            floats first = near * c - far * s, second = far * c + near * s;
            for (int r = 0; r < ROWS; r++) sums[r] += query[r * head_dim + p] * first + query[r * head_dim + pairs + p] * second;
        }
        for (int d = 2 * pairs; d < head_dim; d++)
            for (int r = 0; r < ROWS; r++) sums[r] += query[r * head_dim + d] * load(keys + d * wide + v * LANES, LANES);
        for (int r = 0; r < ROWS; r++) store(out + (int64_t)r * codes->tokens + v * LANES, sums[r], left - v * LANES);
    }
}

/* out [items][groups][ROWS][tokens] = start + sum over the channels of a group of query * scale * code, with query
   [items][ROWS][channels]; scales [items][blocks][channels] and start [items][ROWS][blocks], of blocks of `block` tokens, may be
   NULL. */
void code_scores(const Codes *codes, int groups, int block, const float *query, const float *scales, const float *start,
                 float *out, int threads) {
    int chunk = scales || start ? (block >= CHUNK ? block : CHUNK / block * block) : CHUNK;
    int chunks = (codes->tokens + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int unit = 0; unit < codes->items * chunks; unit++) {
        int item = unit / chunks, at = unit % chunks * chunk, stop = at + chunk < codes->tokens ? at + chunk : codes->tokens;
        scores_unit(codes, item, groups, block, query, scales, start, out, at, stop);
    }
}

/* out [items][ROWS][channels] = sum over tokens of weight * scale * code, with weights [items][groups][ROWS][tokens] of the
   channel's group, scales as in `code_scores`. */
void code_mix(const Codes *codes, int groups, int block, const float *weights, const float *scales, float *out,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int unit = 0; unit < codes->items * codes->wide; unit++)
        mix_unit(codes, unit / codes->wide, unit % codes->wide, groups, block, weights, scales, out);
}

/* out [items][ROWS][tokens] = query [items][ROWS][head_dim] times rotated keys, rebuilt as in `rotated_tile` with matrix
   [heads][columns][head_dim]. cos and sin are [rows or 1][heads or 1][pairs][tokens], given by strides; sizes [items][tokens] or
   NULL. */
void rotated_scores(const Codes *codes, const float *query, int head_dim, const float *matrix, int columns,
                   const float *sizes, const float *cos, const float *sin, int64_t angle_batch, int64_t angle_head, int pairs,
                   float *out, int threads) {
    int tiles = (codes->tokens + BATCH * LANES - 1) / (BATCH * LANES), heads = codes->heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int unit = 0; unit < codes->items / heads * tiles; unit++) {
        int row = unit / tiles, at = unit % tiles * BATCH * LANES, count;
        /* All heads of a tile in one unit: they mostly share cos and sin, which lie far apart in memory and are prefetched once. */
        for (int head = 0; head < heads; head++) {
            int64_t angle = row * angle_batch + head * angle_head + at, item = row * heads + head;
            for (int p = 0; p < pairs && (head == 0 || angle_head); p++)
                for (int v = 0; v < BATCH; v++) {
                    __builtin_prefetch(cos + angle + (int64_t)p * codes->tokens + v * LANES);
                    __builtin_prefetch(sin + angle + (int64_t)p * codes->tokens + v * LANES);
                }
            const int16_t *words = words_of(codes, item, &count) + at;
            rotated_tile(codes, words, count, matrix + (int64_t)head * head_dim * columns, columns,
                        sizes ? sizes + item * codes->tokens + at : 0, query + item * ROWS * head_dim, head_dim, pairs, cos + angle,
                        sin + angle, out + item * ROWS * codes->tokens + at, codes->tokens - at);
        }
    }
}
