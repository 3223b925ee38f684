// Kernels that only the emulator's own tests launch: each shows one thing that it must do or report.
#include "device.cuh"

struct TestArgs {
    u32 *out;
    const u32 *in;
    u32 n, what;
};

// Every kind of exchange between the lanes of a warp, 32 words a kind.
HZ_KERNEL(64, 1) test_lanes(HZ_ARGS(TestArgs, a)) {
    const u32 id = thread_id(), n = block_threads();
    u32 v = a.in[id];
    a.out[id] = shuffle_xor(v, 1) + 3 * shuffle_xor(v, 16);
    a.out[n + id] = shuffle(v, id / 4 * 3 + 1);
    float sum = (float)v;
    for (u32 lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    a.out[2 * n + id] = (u32)sum;
    a.out[3 * n + id] = ballot(v % 3 == 0);
}

// A tree sum over the block in shared memory. Threads beyond n return at once; the others still meet.
HZ_KERNEL(1024, 1) test_block_sum(HZ_ARGS(TestArgs, a)) {
    HZ_SHARED(memory);
    u32 *sums = reinterpret_cast<u32 *>(memory);
    const u32 id = thread_id();
    if (id >= a.n) return;
    sums[id] = a.in[id];
    block_sync();
    for (u32 width = a.n; width > 1;) {
        const u32 half = (width + 1) / 2;
        u32 other = 0;
        if (id + half < width) other = sums[id + half];
        block_sync();
        if (id < half) sums[id] += other;
        block_sync();
        width = half;
    }
    if (id == 0) a.out[block_x() + grid_x() * (block_y() + grid_y() * block_z())] = sums[0];
}

// d (16 x 8 FP32) += a (16 x 16 FP16) * b (16 x 8 FP16), row-major; a at in, b after it.
HZ_KERNEL(32, 1) test_product(HZ_ARGS(TestArgs, p)) {
    const u16 *a = reinterpret_cast<const u16 *>(p.in), *b = a + 256;
    float *out = reinterpret_cast<float *>(p.out);
    const u32 g = thread_id() / 4, t = 2 * (thread_id() % 4);
    const u32 left[4] = {a[g * 16 + t] | (u32)a[g * 16 + t + 1] << 16, a[(g + 8) * 16 + t] | (u32)a[(g + 8) * 16 + t + 1] << 16,
                         a[g * 16 + t + 8] | (u32)a[g * 16 + t + 9] << 16,
                         a[(g + 8) * 16 + t + 8] | (u32)a[(g + 8) * 16 + t + 9] << 16};
    float d[4] = {out[g * 8 + t], out[g * 8 + t + 1], out[(g + 8) * 8 + t], out[(g + 8) * 8 + t + 1]};
    for (u32 i = 0; i < p.n; ++i) {
        mma_16x8x16(d, left, b[t * 8 + g] | (u32)b[(t + 1) * 8 + g] << 16, b[(t + 8) * 8 + g] | (u32)b[(t + 9) * 8 + g] << 16);
    }
    out[g * 8 + t] = d[0];
    out[g * 8 + t + 1] = d[1];
    out[(g + 8) * 8 + t] = d[2];
    out[(g + 8) * 8 + t + 1] = d[3];
}

// FP16 arithmetic: per thread i, in[3i], in[3i + 1], in[3i + 2] -> a + b, a * b + c, and {b, a} by bytes of c.
HZ_KERNEL(256, 1) test_halves(HZ_ARGS(TestArgs, p)) {
    const u32 i = block_x() * block_threads() + thread_id();
    if (i >= p.n) return;
    const u32 a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
    p.out[3 * i] = f16x2_add(a, b);
    p.out[3 * i + 1] = f16x2_fma(a, b, c);
    p.out[3 * i + 2] = byte_permute(a, b, c);
}

// Blocks take tickets and go on in the order of their tickets: out[0] tickets, out[1] turn, then the order.
HZ_KERNEL(64, 1) test_turns(HZ_ARGS(TestArgs, a)) {
    HZ_SHARED(memory);
    u32 *ticket = reinterpret_cast<u32 *>(memory);
    if (thread_id() == 0) {
        *ticket = atomic_add(a.out, 1);
        while (load_acquire(a.out + 1) != *ticket) pause();
    }
    block_sync();
    const u32 mine = *ticket;
    if (thread_id() == 40) a.out[2 + mine] = block_x();
    block_sync();
    if (thread_id() == 0) store_release(a.out + 1, mine + 1);
}

// All blocks wait for all, n times; each sees what every block wrote before.
HZ_KERNEL(96, 1) test_grid_barrier(HZ_ARGS(TestArgs, a)) {
    for (u32 round = 0; round < a.n; ++round) {
        if (thread_id() == 95) a.out[1 + block_x()] = round + block_x();
        block_sync();
        if (thread_id() == 0) {
            add_release(a.out, 1);
            while (load_acquire(a.out) < (2 * round + 1) * grid_x()) pause();
        }
        block_sync();
        u32 sum = 0;
        for (u32 i = 0; i < grid_x(); ++i) sum += load_shared_u32(a.out + 1 + i);
        if (sum != round * grid_x() + grid_x() * (grid_x() - 1) / 2) a.out[1 + grid_x()] = 1;
        block_sync();
        if (thread_id() == 0) {
            add_release(a.out, 1);
            while (load_acquire(a.out) < 2 * (round + 1) * grid_x()) pause();
        }
        block_sync();
    }
}

// Copies n words in pieces of 16 bytes through three buffers, two groups ahead; what = 1 forgets to wait.
HZ_KERNEL(32, 1) test_copies(HZ_ARGS(TestArgs, a)) {
    HZ_SHARED(memory);
    const u32 id = thread_id(), rounds = a.n / 128;
    for (u32 i = 0; i < 2; ++i) {
        if (i < rounds) copy_async16(memory + i * 512 + id * 16, a.in + i * 128 + id * 4);
        copy_commit();
    }
    for (u32 i = 0; i < rounds; ++i) {
        if (a.what != 1) copy_wait<1>();
        block_sync();
        const u32 *words = reinterpret_cast<const u32 *>(memory + i % 3 * 512);
        for (u32 j = 0; j < 4; ++j) a.out[i * 128 + j * 32 + id] = words[j * 32 + id];
        if (i + 2 < rounds) copy_async16(memory + (i + 2) % 3 * 512 + id * 16, a.in + (i + 2) * 128 + id * 4);
        copy_commit();
    }
    block_sync();
    copy_wait<0>();
}

// Waits until the host has written: in[0] to become n, then out[0] = n + 1.
HZ_KERNEL(32, 1) test_host(HZ_ARGS(TestArgs, a)) {
    if (thread_id() == 0) {
        while (load_host(a.in) != a.n) pause();
        fence_system();
        store_host(a.out, a.n + 1);
    }
    warp_sync();
}

// Mistakes, by number.
HZ_KERNEL(64, 1) test_mistakes(HZ_ARGS(TestArgs, a)) {
    HZ_SHARED(memory);
    const u32 id = thread_id();
    switch (a.what) {
    case 0:  // half a warp at a shuffle
        if (id % 2 == 0) a.out[id] = shuffle_xor(id, 2);
        break;
    case 1:  // a shuffle here, a ballot there
        a.out[id] = id < 16 ? shuffle_xor(id, 1) : ballot(true);
        break;
    case 2:  // one warp at the barrier, one lane elsewhere
        if (id == 3) warp_sync();
        block_sync();
        break;
    case 3:  // nobody will write it
        if (id == 5) {
            while (load_acquire(a.in) != 77) pause();
        }
        block_sync();
        break;
    case 4:  // beyond the end
        a.out[a.n + 500 + id] = 1;
        break;
    case 5:  // just beyond the end
        if (id == 0) a.out[a.n] = 1;
        break;
    case 6:  // shared memory, just beyond
        memory[a.n] = 1;
        break;
    case 7:  // not aligned
        a.out[id] = load_slot(a.in + 1).x;
        break;
    case 8:  // read before any write: poison
        a.out[id] = reinterpret_cast<const u32 *>(memory)[id];
        break;
    default: break;
    }
}

// More stack than a fiber has.
HZ_KERNEL(64, 1) test_stack(HZ_ARGS(TestArgs, a)) {
    volatile u8 much[100000];
    for (u32 i = 0; i < sizeof much; ++i) much[i] = (u8)i;
    a.out[thread_id()] = much[thread_id() + a.n];
}
