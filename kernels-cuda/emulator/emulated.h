// What device.cuh offers to kernels, on a machine without a card: the same names with the same meaning.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "fibers.h"

#define HZ_CAPABILITY 900

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

#define HZ_DEVICE inline
#define HZ_KERNEL(THREADS, BLOCKS) void
#define HZ_SHARED(NAME) u8 *const NAME = hz::current->block->shared
#define HZ_ARGS(TYPE, NAME) const TYPE &NAME

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};
struct alignas(8) f32x2 {
    float x, y;
};

HZ_DEVICE u32 thread_id() { return hz::current->id; }
HZ_DEVICE u32 block_threads() { return hz::current->block->threads; }
HZ_DEVICE u32 block_x() { return hz::current->block->at[0]; }
HZ_DEVICE u32 block_y() { return hz::current->block->at[1]; }
HZ_DEVICE u32 block_z() { return hz::current->block->at[2]; }
HZ_DEVICE u32 grid_x() { return hz::current->block->grid[0]; }
HZ_DEVICE u32 grid_y() { return hz::current->block->grid[1]; }
HZ_DEVICE u32 grid_z() { return hz::current->block->grid[2]; }

HZ_DEVICE u32 f32_bits(float a) {
    u32 r;
    memcpy(&r, &a, 4);
    return r;
}
HZ_DEVICE float f32_from_bits(u32 a) {
    float r;
    memcpy(&r, &a, 4);
    return r;
}

HZ_DEVICE void block_sync() { hz::block_barrier(); }
HZ_DEVICE void warp_sync() { hz::meet(hz::current, hz::Meeting::Sync); }
HZ_DEVICE u32 shuffle_xor(u32 v, u32 lanes) {
    return hz::exchange(hz::Meeting::Shuffle, v, hz::current->lane ^ lanes);
}
HZ_DEVICE float shuffle_xor(float v, u32 lanes) { return f32_from_bits(shuffle_xor(f32_bits(v), lanes)); }
HZ_DEVICE u32 shuffle(u32 v, u32 lane) { return hz::exchange(hz::Meeting::Shuffle, v, lane); }
HZ_DEVICE float shuffle(float v, u32 lane) { return f32_from_bits(shuffle(f32_bits(v), lane)); }
HZ_DEVICE u32 ballot(bool v) {
    hz::Lane *me = hz::current;
    hz::Warp *w = me->warp;
    u32 *values = w->values[w->buffer];
    values[me->lane] = v;
    hz::meet(me, hz::Meeting::Ballot);
    u32 mask = 0;
    for (u32 lane = 0; lane < hz::WARP; ++lane) mask |= values[lane] << lane;
    return mask;
}

HZ_DEVICE float f16_to_f32(u16 v) { return _cvtsh_ss(v); }
// A NaN becomes the card's one NaN.
HZ_DEVICE u16 f32_to_f16(float v) { return v != v ? 0x7fff : _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
HZ_DEVICE u32 f16x2(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }

namespace hz {
// One rounding from double to FP16: FP32 on the way is rounded to odd, which the second rounding cannot see.
inline u16 f16_from_double(double v) {
    float f = (float)v;
    if (f != f || isinf(v)) return f32_to_f16(f);
    u32 bits = f32_bits(f);
    if ((double)f != v) {
        if (fabs((double)f) > fabs(v)) bits -= 1;
        bits |= 1;
    }
    return f32_to_f16(f32_from_bits(bits));
}
}  // namespace hz

// In double, the sum of two FP16 is exact, and the sum of a product and an FP16 is exact wherever it is near a tie.
HZ_DEVICE u32 f16x2_add(u32 a, u32 b) {
    const u32 low = hz::f16_from_double((double)f16_to_f32((u16)a) + (double)f16_to_f32((u16)b));
    const u32 high = hz::f16_from_double((double)f16_to_f32((u16)(a >> 16)) + (double)f16_to_f32((u16)(b >> 16)));
    return low | high << 16;
}
HZ_DEVICE u32 f16x2_fma(u32 a, u32 b, u32 c) {
    const u32 low = hz::f16_from_double(
        fma((double)f16_to_f32((u16)a), (double)f16_to_f32((u16)b), (double)f16_to_f32((u16)c)));
    const u32 high = hz::f16_from_double(fma((double)f16_to_f32((u16)(a >> 16)), (double)f16_to_f32((u16)(b >> 16)),
                                             (double)f16_to_f32((u16)(c >> 16))));
    return low | high << 16;
}
HZ_DEVICE float f32_fma(float a, float b, float c) { return fmaf(a, b, c); }
HZ_DEVICE float f32_mul(float a, float b) { return a * b; }
HZ_DEVICE float f32_add(float a, float b) { return a + b; }
HZ_DEVICE float f32_div(float a, float b) { return a / b; }
HZ_DEVICE float f32_exp(float a) { return expf(a); }
HZ_DEVICE float f32_max(float a, float b) { return fmaxf(a, b); }
HZ_DEVICE float f32_min(float a, float b) { return fminf(a, b); }
HZ_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    const u64 both = a | (u64)b << 32;
    u32 r = 0;
    for (u32 i = 0; i < 4; ++i) r |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}

// Products are exact; they are added in FP32 in the order of k. A card's order is its own.
HZ_DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    hz::Lane *me = hz::current;
    hz::Product &p = me->warp->products[me->warp->buffer];
    memcpy(p.a[me->lane], a, sizeof a);
    p.b[me->lane][0] = b0;
    p.b[me->lane][1] = b1;
    memcpy(p.d[me->lane], d, sizeof d);
    if (hz::meet(me, hz::Meeting::Product)) hz::multiply(p);
    memcpy(d, p.d[me->lane], sizeof d);
}

// A card refuses an address that is no multiple of the access.
template <class T> HZ_DEVICE T hz_load(const void *p) {
    if ((u64)p % sizeof(T)) hz::misaligned(p, sizeof(T));
    return *static_cast<const T *>(p);
}
HZ_DEVICE u32x4 load_stream(const void *p) { return hz_load<u32x4>(p); }
HZ_DEVICE u32 load_stream_u32(const void *p) { return hz_load<u32>(p); }
HZ_DEVICE u32x4 load_slot(const void *p) { return hz_load<u32x4>(p); }
HZ_DEVICE u32 load_slot_u32(const void *p) { return hz_load<u32>(p); }
HZ_DEVICE float load_shared_f32(const float *p) { return *(const volatile float *)p; }
HZ_DEVICE u32 load_shared_u32(const u32 *p) { return *(const volatile u32 *)p; }
HZ_DEVICE u32x4 load_shared_x4(const void *p) { return hz_load<u32x4>(p); }

HZ_DEVICE u32 atomic_add(u32 *p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
HZ_DEVICE u64 atomic_max(u64 *p, u64 v) {
    u64 old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
HZ_DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HZ_DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HZ_DEVICE u32 load_acquire(const u32 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
HZ_DEVICE void store_release(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
HZ_DEVICE u32 add_release(u32 *p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
HZ_DEVICE u32 load_host(const u32 *p) { return *(const volatile u32 *)p; }
HZ_DEVICE u32x4 load_host_x4(const void *p) { return hz_load<u32x4>(p); }
HZ_DEVICE void prefetch_line(const void *) {}
HZ_DEVICE u32x4 load_cache_x4(const void *p) { return *(const u32x4 *)p; }
HZ_DEVICE float f32_inverse_sqrt(float a) { return 1.0f / std::sqrt(a); }
HZ_DEVICE u32 and_or(u32 v, u32 mask, u32 bits) { return (v & mask) | bits; }
HZ_DEVICE u32 log2_of(u32 a) { return 31 - (u32)__builtin_clz(a); }
HZ_DEVICE u64 clock_now() { return 0; }
HZ_DEVICE void store_host(u32 *p, u32 v) { *(volatile u32 *)p = v; }
HZ_DEVICE void pause() { hz::sleep_lane(); }

HZ_DEVICE void successor_start() {}
HZ_DEVICE void predecessor_wait() {}

// Between start and wait the target holds neither old nor new: it is poisoned at once, written at the wait.
HZ_DEVICE void copy_async16(void *shared, const void *global) { hz::copy_start(shared, global); }
HZ_DEVICE void copy_commit() { hz::copy_close(); }
template <int PENDING> HZ_DEVICE void copy_wait() { hz::copy_finish(PENDING); }
