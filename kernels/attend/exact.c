/* Attention of a few query rows over exact tokens (the window and the new ones), merged with other parts of the softmax and
   normalised: the last step of a layer's attention on a CPU. `exact_cpu.py` documents the shapes.

   A unit of work ("item") is a KV head of a row, with all of its query rows. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define GROUPS 3 /* most groups of tokens */
#define MOST_PARTS 16

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* A group of tokens per row and head, with contiguous channels. Instead of keys there may be scores, float32 [items][ROWS][scored]:
   token t has score t or, with an index int32 [rows][tokens], score index[t]; -1 means that its key is used. */
typedef struct {
    const void *keys, *values;
    const float *scores;
    const int32_t *index;
    int64_t key_row, key_head, key_token, value_row, value_head, value_token;
    int32_t tokens, scored;
} Group;

typedef struct {
    Group groups[GROUPS];
    const float *top[MOST_PARTS], *mass[MOST_PARTS], *mixed[MOST_PARTS]; /* [items][ROWS], and [items][ROWS][value_dim] */
    const float *query;                                                  /* [items][ROWS][key_dim] */
    const uint8_t *hidden; /* mask per row and head over the tokens of all groups: 1 if hidden; or NULL */
    int64_t hidden_row, hidden_head;
    float *out;               /* [items][ROWS][value_dim] */
    float *told, *normaliser; /* scores [items][ROWS][tokens of all groups], log-sum-exp [items][ROWS]; or NULL */
    int32_t rows, heads, key_dim, value_dim, parts, kind;
    float softcap;
} Asked;

/* Loads a vector of numbers of type `kind` as float32. */
INLINE floats numbers_at(const int kind, const void *from, int64_t at, int left) {
    if (kind == FLOAT32) return load((const float *)from + at, left);
    if (kind == FLOAT16) return of_halves((const uint16_t *)from + at, left);
    halves found = {0};
    memcpy(&found, (const uint16_t *)from + at, 2 * (size_t)(left < LANES ? left : LANES));
    return (floats)(__builtin_convertvector(found, ints) << 16);
}

static int tokens_of(const Asked *asked) {
    int total = 0;
    for (int g = 0; g < GROUPS; g++) total += asked->groups[g].tokens;
    return total;
}

INLINE void item_attention(const int kind, const Asked *asked, int item, float *scores) {
    int row = item / asked->heads, head = item % asked->heads, total = tokens_of(asked), at = 0;
    int key_dim = asked->key_dim, value_dim = asked->value_dim;
    const float *query = asked->query + (int64_t)item * ROWS * key_dim;
    const uint8_t *hidden = asked->hidden ? asked->hidden + row * asked->hidden_row + head * asked->hidden_head : 0;
    float top[ROWS], mass[ROWS];
    for (int r = 0; r < ROWS; r++) {
        top[r] = -1e38f, mass[r] = 0;
        for (int part = 0; part < asked->parts; part++) {
            float other = asked->top[part][item * ROWS + r];
            top[r] = other > top[r] ? other : top[r];
        }
    }
    for (int g = 0; g < GROUPS; g++) {
        const Group *group = asked->groups + g;
        for (int t = 0; t < group->tokens; t++, at++) {
            int64_t key = row * group->key_row + head * group->key_head + t * group->key_token;
            int number = !group->scores ? -1 : group->index ? group->index[(int64_t)row * group->tokens + t] : t;
            floats sums[ROWS];
            for (int r = 0; r < ROWS; r++) sums[r] = (floats){0};
            for (int d = 0; d < key_dim && number < 0; d += LANES) {
                floats part = numbers_at(kind, group->keys, key + d, key_dim - d);
                for (int r = 0; r < ROWS; r++) sums[r] += load(query + r * key_dim + d, key_dim - d) * part;
            }
            for (int r = 0; r < ROWS; r++) {
                float score =
                    number < 0 ? sum_of(sums[r]) : group->scores[((int64_t)item * ROWS + r) * group->scored + number];
                if (asked->softcap > 0) score = tanhf(score / asked->softcap) * asked->softcap;
                if (hidden && hidden[at]) score = -INFINITY;
                scores[r * total + at] = score;
                top[r] = score > top[r] ? score : top[r];
            }
        }
    }
    if (asked->told) memcpy(asked->told + (int64_t)item * ROWS * total, scores, sizeof(float) * ROWS * total);
    float *out = asked->out + (int64_t)item * ROWS * value_dim;
    memset(out, 0, sizeof(float) * ROWS * value_dim);
    for (int part = 0; part < asked->parts; part++)
        for (int r = 0; r < ROWS; r++) {
            float share = expf(asked->top[part][item * ROWS + r] - top[r]);
            const float *mixed = asked->mixed[part] + ((int64_t)item * ROWS + r) * value_dim;
            mass[r] += asked->mass[part][item * ROWS + r] * share;
            for (int d = 0; d < value_dim; d++) out[r * value_dim + d] += mixed[d] * share;
        }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < total; t++) {
            scores[r * total + t] = expf(scores[r * total + t] - top[r]);
            mass[r] += scores[r * total + t];
        }
    for (int r = 0; r < ROWS && asked->normaliser; r++) asked->normaliser[(int64_t)item * ROWS + r] = top[r] + logf(mass[r]);
    for (int d = 0; d < value_dim; d += LANES) {
        floats sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = load(out + r * value_dim + d, value_dim - d);
        at = 0;
        for (int g = 0; g < GROUPS; g++) {
            const Group *group = asked->groups + g;
            int64_t value = row * group->value_row + head * group->value_head + d;
            for (int t = 0; t < group->tokens; t++, at++) {
                floats part = numbers_at(kind, group->values, value + t * group->value_token, value_dim - d);
                for (int r = 0; r < ROWS; r++) sums[r] += scores[r * total + at] * part;
            }
        }
        for (int r = 0; r < ROWS; r++) store(out + r * value_dim + d, sums[r] / (mass[r] > 1e-38f ? mass[r] : 1e-38f), value_dim - d);
    }
}

static void item_of(const Asked *asked, int item, float *scores) {
    if (asked->kind == FLOAT32)
        item_attention(FLOAT32, asked, item, scores);
    else if (asked->kind == BFLOAT16)
        item_attention(BFLOAT16, asked, item, scores);
    else
        item_attention(FLOAT16, asked, item, scores);
}

/* Returns 0, or -1 if memory cannot be allocated. */
int attend_exact(const Asked *asked, int threads) {
    int items = asked->rows * asked->heads, total = tokens_of(asked);
    float *scores = malloc(sizeof(float) * ((int64_t)items * ROWS * total + 1));
    if (!scores) return -1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int item = 0; item < items; item++) item_of(asked, item, scores + (int64_t)item * ROWS * total);
    free(scores);
    return 0;
}
