// Everything that a kernel takes from the compiler or from the card, under names of our own: one file for the card,
// one (emulator/emulated.h) for a machine without one. Kernels include this file and nothing else of the compiler's.
#pragma once

#ifdef HZ_EMULATED
#include "emulated.h"
#else

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

#define HZ_DEVICE __device__ __forceinline__
// Compute capability that is compiled for: 9.0 is 900.
#define HZ_CAPABILITY __CUDA_ARCH__
// A kernel: at most THREADS threads a block, registers limited so that BLOCKS blocks fit on a multiprocessor.
#define HZ_KERNEL(THREADS, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
// The block's dynamic shared memory, aligned to 128 bytes. There is no static shared memory.
#define HZ_SHARED(NAME) extern __shared__ __align__(128) u8 NAME[]
// An argument struct, by value.
#define HZ_ARGS(TYPE, NAME) const __grid_constant__ TYPE NAME

struct __align__(16) u32x4 {
    u32 x, y, z, w;
};
struct __align__(8) u32x2 {
    u32 x, y;
};
struct __align__(16) f32x4 {
    float x, y, z, w;
};
struct __align__(8) f32x2 {
    float x, y;
};

HZ_DEVICE u32 thread_id() { return threadIdx.x; }
HZ_DEVICE u32 block_threads() { return blockDim.x; }
HZ_DEVICE u32 block_x() { return blockIdx.x; }
HZ_DEVICE u32 block_y() { return blockIdx.y; }
HZ_DEVICE u32 block_z() { return blockIdx.z; }
HZ_DEVICE u32 grid_x() { return gridDim.x; }
HZ_DEVICE u32 grid_y() { return gridDim.y; }
HZ_DEVICE u32 grid_z() { return gridDim.z; }

HZ_DEVICE void block_sync() { __syncthreads(); }
HZ_DEVICE void warp_sync() { __syncwarp(); }
HZ_DEVICE float shuffle_xor(float v, u32 lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
HZ_DEVICE u32 shuffle_xor(u32 v, u32 lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
HZ_DEVICE float shuffle(float v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
HZ_DEVICE u32 shuffle(u32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
HZ_DEVICE u32 ballot(bool v) { return __ballot_sync(0xffffffffu, v); }

// FP16 values are raw bits: u16, or two in a u32, the lower half first.
HZ_DEVICE float f16_to_f32(u16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}
// Nearest, ties to even; beyond the range, infinity.
HZ_DEVICE u16 f32_to_f16(float v) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}
HZ_DEVICE u32 f16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
HZ_DEVICE u32 f16x2_add(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
HZ_DEVICE u32 f16x2_fma(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
HZ_DEVICE float f32_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HZ_DEVICE float f32_mul(float a, float b) { return __fmul_rn(a, b); }
HZ_DEVICE float f32_add(float a, float b) { return __fadd_rn(a, b); }
// Quotient, inverse square root and exponential are the card's own: within 2 ulp, the exponential within 2 ulp for arguments
// near zero and |a| * 2^-23 relative further out. Their exact forms are a hundred instructions long, and a program that
// does not fit the instruction cache waits for itself.
HZ_DEVICE float f32_div(float a, float b) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
HZ_DEVICE float f32_inverse_sqrt(float a) {
    float r;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
HZ_DEVICE float f32_exp(float a) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(__fmul_rn(a, 1.44269504f)));
    return r;
}
HZ_DEVICE float f32_max(float a, float b) { return fmaxf(a, b); }
HZ_DEVICE float f32_min(float a, float b) { return fminf(a, b); }
// (v & mask) | bits in one instruction; the compiler makes two of it.
HZ_DEVICE u32 and_or(u32 v, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
    return r;
}
// The exponent of a power of two.
HZ_DEVICE u32 log2_of(u32 a) { return 31 - __clz((int)a); }
HZ_DEVICE u32 f32_bits(float a) { return __float_as_uint(a); }
HZ_DEVICE float f32_from_bits(u32 a) { return __uint_as_float(a); }
// Bytes of {a, b} (b above a) chosen by the nibbles of `selector`, lowest first.
HZ_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// d += a * b, one warp: a is 16 x 16 FP16 (row-major fragment), b is 16 x 8 FP16, d is 16 x 8 FP32.
// With g = lane / 4, t = lane % 4: a = {(g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)},
// b = {(2t.., g), (2t + 8.., g)}, d = {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}.
HZ_DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes that nothing writes while the kernel runs and that are read once: dense weights.
HZ_DEVICE u32x4 load_stream(const void *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
HZ_DEVICE u32 load_stream_u32(const void *p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// 16 bytes that a copy may have written before the last acquire: expert slots. Coherent.
HZ_DEVICE u32x4 load_slot(const void *p) {
    u32x4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
HZ_DEVICE u32 load_slot_u32(const void *p) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// From the second-level cache: what another block of this or of an earlier kernel wrote.
HZ_DEVICE float load_shared_f32(const float *p) { return __ldcg(p); }
HZ_DEVICE u32 load_shared_u32(const u32 *p) { return __ldcg(p); }
HZ_DEVICE u32x4 load_shared_x4(const void *p) {
    const uint4 v = __ldcg(static_cast<const uint4 *>(p));
    return {v.x, v.y, v.z, v.w};
}

// Keys and values of earlier steps: nothing writes them while the kernel runs.
HZ_DEVICE u32x4 load_cache_x4(const void *p) {
    const uint4 v = *static_cast<const uint4 *>(p);
    return {v.x, v.y, v.z, v.w};
}
// A clock of the multiprocessor.
HZ_DEVICE u64 clock_now() { return (u64)clock64(); }

HZ_DEVICE u32 atomic_add(u32 *p, u32 v) { return atomicAdd(p, v); }
HZ_DEVICE u64 atomic_max(u64 *p, u64 v) { return atomicMax(p, v); }
HZ_DEVICE void fence_device() { __threadfence(); }
HZ_DEVICE void fence_system() { __threadfence_system(); }
HZ_DEVICE u32 load_acquire(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
HZ_DEVICE void store_release(u32 *p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
HZ_DEVICE u32 add_release(u32 *p, u32 v) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
// Host memory that the host wrote before the launch, or polls.
HZ_DEVICE u32 load_host(const u32 *p) { return *(const volatile u32 *)p; }
HZ_DEVICE u32x4 load_host_x4(const void *p) {
    u32x4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
HZ_DEVICE void store_host(u32 *p, u32 v) { *(volatile u32 *)p = v; }
// For the body of a loop that waits.
HZ_DEVICE void pause() { __nanosleep(20); }

// A line of 128 bytes into the second-level cache.
HZ_DEVICE void prefetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The next kernel of the stream may start; it may not read what this one writes before its own predecessor_wait.
HZ_DEVICE void successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Everything that the kernels before this one in the stream wrote is visible afterwards.
HZ_DEVICE void predecessor_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes from global to shared memory, asynchronously; groups of copies end in the order of their commits.
HZ_DEVICE void copy_async16(void *shared, const void *global) {
    const u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
HZ_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> HZ_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

#endif
