// Attention of single rows, split over the positions that a row sees, and the append of keys and values.
#include "attention.cuh"

static constexpr u32 WARPS = 4;
// Splits of a row, and positions of a split at least.
static constexpr u32 MOST_SPLITS = 32, LEAST_POSITIONS = 32;

// Keys and values of the step's rows into the cache, where rows of one sequence may see one another. Grid: rows, kv heads.
// Shared memory in floats: query, key and value [padded], then two floats a warp.
// registers: 128
HZ_KERNEL(128, 4) append_kv(HZ_ARGS(AttendArgs, a)) {
    HZ_SHARED(shared);
    float *query = (float *)shared, *key = query + a.padded, *value = key + a.padded;
    successor_start();
    predecessor_wait();
    const Row row = a.rows[block_x()];
    const float *qkv = a.qkv + (u64)block_x() * (a.heads + 2 * a.kv_heads) * a.head_dim;
    const u32 head = block_y() * (a.heads / a.kv_heads);
    prepare_all<6>(a, qkv, head, block_y(), row.position, true, query, value + a.padded);
    for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
        cache_row(a, row.sequence, block_y(), 0, row.position)[i] = f32_to_f16(key[i]);
        cache_row(a, row.sequence, block_y(), 1, row.position)[i] = f32_to_f16(value[i]);
    }
}

// Grid: heads, MOST_SPLITS, rows.
template <u32 LANES> HZ_DEVICE void attend(const AttendArgs &a, u8 *shared) {
    successor_start();
    predecessor_wait();
    attend_head<LANES, WARPS, MOST_SPLITS, LEAST_POSITIONS>(a, block_x(), block_y(), block_z(), shared);
}

// Heads up to 32, 64, 128 and 256 wide.
// registers: 128
HZ_KERNEL(128, 4) attend_32(HZ_ARGS(AttendArgs, a)) {
    HZ_SHARED(shared);
    attend<4>(a, shared);
}
// registers: 128
HZ_KERNEL(128, 4) attend_64(HZ_ARGS(AttendArgs, a)) {
    HZ_SHARED(shared);
    attend<8>(a, shared);
}
// registers: 128
HZ_KERNEL(128, 4) attend_128(HZ_ARGS(AttendArgs, a)) {
    HZ_SHARED(shared);
    attend<16>(a, shared);
}
// registers: 128
HZ_KERNEL(128, 4) attend_256(HZ_ARGS(AttendArgs, a)) {
    HZ_SHARED(shared);
    attend<32>(a, shared);
}
