/* Attention of a few rows of queries over many keys, with log-sum-exp, in fp32, for
   processors with AVX2 or AVX-512.

   Keys and values are read once for all rows of a head, as they lie in memory.
   DTYPE says what they are: 0 for fp32, 1 for bf16, 2 for fp16.
   WIDTH is the numbers in a register: 8 with AVX2, 16 with AVX-512.
   Dimensions are multiples of PAIR, at most MAX_DIM. */

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* Numbers in two registers, which are loaded together. */
#define PAIR (2 * WIDTH)
#if DTYPE == 0
#define SIZE 4
#else
#define SIZE 2
#endif
#define INLINE static inline __attribute__((always_inline))

/* Keys whose scores are computed together. They stay in the nearest cache. */
#define STEP 64
/* Keys are fetched so many ahead. */
#define AHEAD 16
#define CACHE_LINE 64
#define MAX_DIM 256

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef float floats4 __attribute__((vector_size(16)));

INLINE floats load_floats(const float *at) {
    floats result;
    memcpy(&result, at, sizeof result);
    return result;
}

INLINE void store_floats(float *at, floats numbers) {
    memcpy(at, &numbers, sizeof numbers);
}

#if DTYPE == 2
INLINE floats load_halves(const char *at) {
#if WIDTH == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#else
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#endif
}
#endif

/* Load two registers. Of bf16 the first has the numbers at even places, the second
   those at odd places: no other order takes as few instructions. */
INLINE void load_pair(const char *at, floats *first, floats *second) {
#if DTYPE == 0
    *first = load_floats((const float *)at);
    *second = load_floats((const float *)at + WIDTH);
#elif DTYPE == 1
    ints bits;
    memcpy(&bits, at, sizeof bits);
    *first = (floats)(bits << 16);
    *second = (floats)(bits & (int32_t)0xffff0000);
#else
    *first = load_halves(at);
    *second = load_halves(at + WIDTH * SIZE);
#endif
}

/* Where `load_pair` puts the number at place `j`. */
INLINE int place_of(int j) {
#if DTYPE == 1
    return j / PAIR * PAIR + j % 2 * WIDTH + j % PAIR / 2;
#else
    return j;
#endif
}

INLINE float sum(floats numbers) {
    floats4 quarters[WIDTH / 4];
    memcpy(quarters, &numbers, sizeof numbers);
    floats4 four = quarters[0] + quarters[1];
    for (int i = 2; i < WIDTH / 4; i++) four += quarters[i];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* 2^x for x <= 0, within 2e-7 of it; NaN for NaN. */
INLINE floats exp2_of(floats x) {
    const floats lowest = (floats){0} - 126.0f;
    const float rounding = 12582912.0f; /* 1.5 * 2^23 */
    ints is_low = x < lowest;
    x = (floats)(((ints)x & ~is_low) | ((ints)lowest & is_low));
    floats nan_or_zero = x - x;
    floats shifted = x + rounding;
    floats fraction = x - (shifted - rounding);
    floats power = (floats){0} + 1.5403530e-4f;
    power = power * fraction + 1.3333558e-3f;
    power = power * fraction + 9.6181291e-3f;
    power = power * fraction + 5.5504109e-2f;
    power = power * fraction + 2.4022651e-1f;
    power = power * fraction + 6.9314718e-1f;
    power = power * fraction + 1.0f;
    ints exponent = (ints)shifted << 23;
    return (floats)((ints)power + exponent) + nan_or_zero;
}

typedef struct {
    const float *query; /* (heads, rows, dim), scaled for powers of 2 */
    const char *key;
    const char *value;
    float *block_out; /* (heads, rows, blocks, value_dim) */
    float *block_lse; /* (heads, rows, blocks), natural */
    int64_t key_head_bytes, value_head_bytes;
    int64_t n_keys, block_keys;
    int heads, rows, dim, value_dim, n_blocks;
    atomic_int next_task;
} Call;

/* -inf, of rows without a finite score so far, is replaced: the difference of two of
   those is NaN. */
INLINE float base_of(float highest) { return highest == -INFINITY ? 0 : highest; }

/* The running statistics of R rows. `highest` is in units of log 2. */
typedef struct {
    float highest, total;
    float summed[MAX_DIM];
} Row;

/* Scores of two keys at a time: enough sums in flight for the processor. The values of
   these keys are fetched meanwhile. */
INLINE void score_keys(const float *query, const char *key, const char *value, int dim,
                       int value_dim, int n_keys, float (*scores)[STEP], const int R) {
    const int key_bytes = dim * SIZE, value_bytes = value_dim * SIZE;
    for (int i = 0; i < n_keys; i += 2) {
        const char *first = key + i * key_bytes;
        const char *second = i + 1 < n_keys ? first + key_bytes : first;
        for (int line = 0; line < 2 * key_bytes; line += CACHE_LINE)
            __builtin_prefetch(first + AHEAD * key_bytes + line);
        for (int line = 0; line < 2 * value_bytes; line += CACHE_LINE)
            __builtin_prefetch(value + i * value_bytes + line);
        floats first_sums[R], second_sums[R];
        for (int r = 0; r < R; r++) {
            first_sums[r] = (floats){0};
            second_sums[r] = (floats){0};
        }
        for (int j = 0; j < dim; j += PAIR) {
            floats first_key[2], second_key[2];
            load_pair(first + j * SIZE, &first_key[0], &first_key[1]);
            load_pair(second + j * SIZE, &second_key[0], &second_key[1]);
            for (int r = 0; r < R; r++)
                for (int half = 0; half < 2; half++) {
                    floats part = load_floats(query + r * MAX_DIM + j + half * WIDTH);
                    first_sums[r] += part * first_key[half];
                    second_sums[r] += part * second_key[half];
                }
        }
        for (int r = 0; r < R; r++) {
            scores[r][i] = sum(first_sums[r]);
            scores[r][i + 1] = sum(second_sums[r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = n_keys; i < STEP; i++) scores[r][i] = -INFINITY;
}

/* Turn the scores of a row into weights. */
INLINE void weigh_keys(Row *row, float *scores, int value_dim) {
    float highest = row->highest;
    for (int i = 0; i < STEP; i++)
        highest = scores[i] > highest ? scores[i] : highest;
    floats total = {0};
    for (int i = 0; i < STEP; i += WIDTH) {
        floats weights = exp2_of(load_floats(scores + i) - base_of(highest));
        total += weights;
        store_floats(scores + i, weights);
    }
    if (highest != row->highest) {
        float shrink = exp2f(row->highest - highest);
        row->total *= shrink;
        for (int j = 0; j < value_dim; j++) row->summed[j] *= shrink;
    }
    row->highest = highest;
    row->total += sum(total);
}

/* Add weighted values, a pair of registers at a time: enough sums in flight. */
INLINE void add_values(Row *rows, const char *value, int value_dim, int n_keys,
                       float (*weights)[STEP], const int R) {
    for (int j = 0; j < value_dim; j += PAIR) {
        floats first_sums[R], second_sums[R];
        for (int r = 0; r < R; r++) {
            first_sums[r] = load_floats(rows[r].summed + j);
            second_sums[r] = load_floats(rows[r].summed + j + WIDTH);
        }
        for (int i = 0; i < n_keys; i++) {
            floats first, second;
            load_pair(value + (i * value_dim + j) * SIZE, &first, &second);
            for (int r = 0; r < R; r++) {
                first_sums[r] += weights[r][i] * first;
                second_sums[r] += weights[r][i] * second;
            }
        }
        for (int r = 0; r < R; r++) {
            store_floats(rows[r].summed + j, first_sums[r]);
            store_floats(rows[r].summed + j + WIDTH, second_sums[r]);
        }
    }
}

/* Attend from R rows of a head, from `first_row` on, over one block of keys. */
INLINE void attend_rows(const Call *call, int head, int block, int first_row,
                        const int R) {
    const int dim = call->dim, value_dim = call->value_dim;
    const int64_t start = block * call->block_keys;
    const int64_t end = start + call->block_keys;
    const int64_t stop = block + 1 == call->n_blocks ? call->n_keys : end;
    const int64_t row_at = (int64_t)head * call->rows + first_row;
    float query[R][MAX_DIM];
    const char *key = call->key + head * call->key_head_bytes;
    const char *value = call->value + head * call->value_head_bytes;
    Row rows[R];
    float scores[R][STEP];
    for (int r = 0; r < R; r++) {
        memset(&rows[r], 0, sizeof rows[r]);
        rows[r].highest = -INFINITY;
        for (int j = 0; j < dim; j++)
            query[r][place_of(j)] = call->query[(row_at + r) * dim + j];
    }
    for (int64_t at = start; at < stop; at += STEP) {
        const int n_keys = stop - at < STEP ? stop - at : STEP;
        const char *key_at = key + at * dim * SIZE;
        const char *value_at = value + at * value_dim * SIZE;
        score_keys(query[0], key_at, value_at, dim, value_dim, n_keys, scores, R);
        for (int r = 0; r < R; r++) weigh_keys(&rows[r], scores[r], value_dim);
        add_values(rows, value_at, value_dim, n_keys, scores, R);
    }
    for (int r = 0; r < R; r++) {
        const int64_t result_at = (row_at + r) * call->n_blocks + block;
        float *out = call->block_out + result_at * value_dim;
        const float highest = rows[r].highest, total = rows[r].total;
        /* A row whose scores are all -inf is 0, but one with NaN is NaN. */
        const float factor = highest == -INFINITY ? total - total : 1 / total;
        for (int j = 0; j < value_dim; j++)
            out[j] = rows[r].summed[place_of(j)] * factor;
        const float log2_total = highest + log2f(total);
        call->block_lse[result_at] = log2_total * 0.6931471805599453f;
    }
}

/* The entry of OpenMP's library by which compilers run a function on all threads. It is
   found in the process, where torch's operators use it. Threads of our own would
   compete with torch's, which go on spinning for some milliseconds behind each
   operator. */
extern void GOMP_parallel(void (*function)(void *), void *argument, unsigned n_threads,
                          unsigned flags);

/* One task is a block of keys of one head. Threads take them as they become free. */
static void take_tasks(void *argument) {
    Call *call = argument;
    const int n_tasks = call->heads * call->n_blocks;
    for (;;) {
        const int task = atomic_fetch_add(&call->next_task, 1);
        if (task >= n_tasks) return;
        const int head = task / call->n_blocks;
        const int block = task % call->n_blocks;
        int row = 0;
        for (; row + 4 <= call->rows; row += 4) attend_rows(call, head, block, row, 4);
        for (; row + 2 <= call->rows; row += 2) attend_rows(call, head, block, row, 2);
        for (; row < call->rows; row++) attend_rows(call, head, block, row, 1);
    }
}

/* Merge the blocks of every row into `out` (heads, rows, value_dim) and `lse`
   (heads, rows). */
static void merge_blocks(const Call *call, float *out, float *lse) {
    const int value_dim = call->value_dim, n_blocks = call->n_blocks;
    const int64_t n_rows = (int64_t)call->heads * call->rows;
    for (int64_t row = 0; row < n_rows; row++) {
        const float *block_lse = call->block_lse + row * n_blocks;
        const float *block_out = call->block_out + row * n_blocks * value_dim;
        float highest = -INFINITY, total = 0;
        for (int block = 0; block < n_blocks; block++)
            highest = block_lse[block] > highest ? block_lse[block] : highest;
        for (int block = 0; block < n_blocks; block++)
            total += expf(block_lse[block] - base_of(highest));
        lse[row] = base_of(highest) + logf(total);
        float *row_out = out + row * value_dim;
        memset(row_out, 0, value_dim * sizeof *row_out);
        for (int block = 0; block < n_blocks; block++) {
            const float exponential = expf(block_lse[block] - base_of(highest));
            const float weight = total == 0 ? 0 : exponential / total;
            for (int j = 0; j < value_dim; j++)
                row_out[j] += weight * block_out[(int64_t)block * value_dim + j];
        }
    }
}

/* `block_out` and `block_lse` are memory for the results of blocks. */
void attend_few_rows(const float *query, const void *key, const void *value,
                     float *block_out, float *block_lse, float *out, float *lse,
                     int64_t key_head_bytes, int64_t value_head_bytes, int64_t n_keys,
                     int64_t block_keys, int heads, int rows, int dim, int value_dim,
                     int n_blocks, int n_threads) {
    Call call = {query, key, value, block_out, block_lse, key_head_bytes,
                 value_head_bytes, n_keys, block_keys, heads, rows, dim, value_dim,
                 n_blocks, 0};
    GOMP_parallel(take_tasks, &call, n_threads, 0);
    merge_blocks(&call, out, lse);
}
