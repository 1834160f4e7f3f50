/* Attention of a few query rows over the packed pages of a tier in one pass, on a CPU (`operation.attend_pages`).

   A unit of work is a run of a row's pages and one KV head: its scores, their softmax, and the mixture of its values. The parts of
   all runs are merged in order. Runs depend on the row's tokens alone, so neither other rows nor the number of threads change a
   bit. Extra memory grows with the row only by a part per run. `pages_cpu.py` documents the shapes. */

#include <math.h>
#include <stdlib.h>

#include "mixtures.h"
#include "scores.h"
#include "rotated.h"

/* `CodeFold` of `packed_pages.py`: values are size back^T c + origin, or for tokens with sizes s, size back^T s c + s (origin -
   mean) + mean; plus, with `table`, the prediction from the codes of keys, unit table^T s (2 c - largest). */
typedef struct {
    const uint16_t *back; /* float16 [heads][components][head_dim] */
    const float *size, *origin, *mean;
    const int16_t *table; /* [heads][components of keys][head_dim], or NULL */
    const float *unit, *largest;
    int32_t head_dim;
} Fold;

/* Columns of a run's mixture: those of values, then those of key codes; each ends with the sum of weights if there are sizes. */
static int value_columns(const Stream *values) { return values->channels + (values->sizes ? 1 : 0); }
static int key_columns(const Stream *keys, const Fold *fold) { return fold && fold->table ? keys->channels + 1 : 0; }

/* Turns the scores of a run, ROWS rows `stride` apart, into weights e^(score - largest), 0 behind the last token; before, adds the
   constant and applies the soft cap. */
static void weigh(float *scores, int stride, int tokens, const float *constant, float softcap, float *top, float *mass) {
    int padded = (tokens + LANES - 1) / LANES * LANES;
    for (int r = 0; r < ROWS; r++) {
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

/* Attends one run of a row's pages: `part` becomes the largest score, the mass and the mixture of each query row. */
static void run_part(const Stream *keys, const Stream *values, int16_t *down, const Turn *turn, const Asked *asked,
                     int row, int head, int first, const float *matrix, const float *angles, Run run, float *part, int wide) {
    enum { ROOM = RUN + BATCH * LANES };
    float scores[ROWS * ROOM], room[ROWS * ROOM], met[ROWS * MOST_CHANNELS], added[ROWS];
    int dim = turn ? turn->head_dim : keys->channels;
    int64_t item = (int64_t)row * asked->heads + head;
    const float *query = asked->query + item * ROWS * dim;
    Stream of_keys, of_values;
    if (keys->trellis) of_keys = put_down(keys, &run, head, down), keys = &of_keys;
    if (values->trellis) of_values = put_down(values, &run, head, down + (int64_t)keys->channels * RUN), values = &of_values;
    if (!turn) meet(keys, asked, row, head, query, met, added);
    for (int number = 0; number < run.count; number++) {
        int slot = number * run.page, tokens = run.tokens - slot < run.page ? run.tokens - slot : run.page;
        if (turn)
            rotated_page(keys, turn, &run, number, head, matrix, angles, query, first + slot, tokens, scores + slot, ROOM);
        else
            page_scores(keys, &run, number, head, query, met, tokens, scores + slot, ROOM);
    }
    weigh(scores, ROOM, run.tokens, turn ? 0 : added, asked->softcap, part, part + ROWS);
    float *mixed = part + 2 * ROWS;
    run_mix(values, &run, head, scores, ROOM, room, mixed, wide);
    int first_of_keys = value_columns(values);
    if (wide > first_of_keys) sized_mix(keys, &run, head, scores, ROOM, room, mixed + first_of_keys, wide);
}

/* Scores of the `ahead` keys behind a row's used slots, as far as the table has them. Whole pages are scored, and the scores of
   these keys are kept. */
static void scores_ahead(const Stream *keys, const Asked *asked, int row, int head) {
    enum { ROOM = MOST_PAGE + LANES };
    float scores[ROWS * ROOM], met[ROWS * MOST_CHANNELS], added[ROWS];
    int64_t item = (int64_t)row * asked->heads + head;
    int first = asked->used[row], last = first + asked->ahead, slots = asked->width * asked->page;
    if (last > slots) last = slots;
    const float *query = asked->query + item * ROWS * keys->channels;
    meet(keys, asked, row, head, query, met, added);
    for (int page = first / asked->page; page * asked->page < last; page++) {
        int slot = page * asked->page, tokens = last - slot < asked->page ? last - slot : asked->page;
        Run own = {asked->table + row * asked->table_row + page, 1, asked->page, tokens};
        page_scores(keys, &own, 0, head, query, met, tokens, scores, ROOM);
        for (int t = first > slot ? first - slot : 0; t < tokens; t++)
            for (int r = 0; r < ROWS; r++)
                asked->ahead_scores[(item * ROWS + r) * asked->ahead + slot + t - first] = scores[r * ROOM + t] + added[r];
    }
}

/* Merges the parts of an item's runs and maps the mixture to channels: by `fold`, or by fixed scales and zero points. */
static void join(const Stream *keys, const Stream *values, const Fold *fold, const Asked *asked, int64_t item,
                 const float *parts, int runs, int64_t size, int wide) {
    int row = item / asked->heads, head = item % asked->heads;
    int dim = fold ? fold->head_dim : values->channels;
    for (int r = 0; r < ROWS; r++) {
        float top = -1e38f, mass = 0, mixed[2 * MOST_CHANNELS + 2] = {0};
        for (int run = 0; run < runs; run++) top = parts[run * size + r] > top ? parts[run * size + r] : top;
        for (int run = 0; run < runs; run++) {
            const float *part = parts + run * size;
            float share = expf(part[r] - top);
            mass += part[ROWS + r] * share;
            for (int c = 0; c < wide; c++) mixed[c] += part[2 * ROWS + r * wide + c] * share;
        }
        int64_t out = item * ROWS + r;
        asked->top[out] = top, asked->mass[out] = mass;
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
            to[d] = moved[d] * fold->size[head] +
                    (mean ? (origin[d] - mean[d]) * mixed[values->channels] + mean[d] * mass : origin[d] * mass);
        if (fold->table) {
            const float *codes = mixed + value_columns(values), *unit = fold->unit + (int64_t)head * dim;
            memset(moved, 0, sizeof(float) * dim);
            for (int k = 0; k < keys->channels; k++) {
                const int16_t *row_of = fold->table + ((int64_t)head * keys->channels + k) * dim;
                float number = 2 * codes[k] - fold->largest[k] * codes[keys->channels];
                for (int d = 0; d < dim; d++) moved[d] += number * row_of[d];
            }
            for (int d = 0; d < dim; d++) to[d] += moved[d] * unit[d];
        }
    }
}

/* Pages per run in a row with `used` tokens. */
static int pages_of(const Asked *asked, int used) {
    int pages = (used < SHORT ? RUN / 2 : RUN) / asked->page;
    return pages > 0 ? pages : 1;
}

/* Arguments are in `Asked`; `turn` and `fold` may be NULL. Returns 0, or -1 if memory cannot be allocated. */
int attend_pages(const Stream *keys, const Stream *values, const Turn *turn, const Fold *fold, const Asked *asked,
                 int threads) {
    int least = pages_of(asked, 0), runs = (asked->width + least - 1) / least, items = asked->rows * asked->heads;
    int wide = value_columns(values) + key_columns(keys, fold);
    int64_t size = (int64_t)ROWS * (2 + wide);
    int dim = turn ? turn->head_dim : 0, columns = keys->channels + (keys->sizes ? 2 : 1);
    int64_t turning = (int64_t)asked->heads * columns * dim + (turn ? 2 * turn->pairs * STRIDE : 0);
    float *parts = malloc(sizeof(float) * ((int64_t)items * runs * size + turning));
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
                for (int r = 0; r < ROWS; r++) part[r] = -1e38f;
                continue;
            }
            Run run = {asked->table + row * asked->table_row + page, (tokens + asked->page - 1) / asked->page, asked->page, tokens};
            run_part(keys, values, down, turn, asked, row, head, page * asked->page,
                     matrices + (int64_t)head * columns * dim, angles, run, part, wide);
        }
#pragma omp for schedule(static)
        for (int item = 0; item < (asked->ahead ? items : 0); item++)
            scores_ahead(keys, asked, item / asked->heads, item % asked->heads);
#pragma omp for schedule(static)
        for (int item = 0; item < items; item++)
            join(keys, values, fold, asked, item, parts + (int64_t)item * runs * size, runs, size, wide);
        free(down);
    }
    free(parts);
    return -failed;
}
