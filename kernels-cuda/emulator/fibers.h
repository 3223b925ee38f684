// CUDA threads as fibers: each has a stack of its own, and all blocks of a launch share one thread of the host. A fiber
// runs until it has to wait; then the next one of its warp that can run does. See README.md of this crate.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace hz {

constexpr uint32_t WARP = 32;
constexpr uint32_t ALL = 0xffffffffu;

// What all lanes of a warp do together.
enum class Meeting : uint8_t { Sync, Shuffle, Ballot, Product };

// Operands of a matrix product by lane; `d` holds the result afterwards.
struct Product {
    uint32_t a[WARP][4];
    uint32_t b[WARP][2];
    float d[WARP][4];
};

struct Run;
struct Warp;
struct Block;
struct Copies;

struct Lane {
    void *sp;        // where the fiber stands while it waits
    uint32_t id;     // thread of the block
    uint32_t lane;   // id % 32
    uint32_t bit;    // its bit in the masks of the warp
    uint32_t place;  // number of that bit
    Warp *warp;
    Block *block;
    Copies *copies;  // started, not yet waited for
    uint8_t *stack_top;
};

// The masks speak of places, not of lanes: with the order reversed, place 0 is lane 31.
struct alignas(64) Warp {
    uint32_t ready;    // can run
    uint32_t asleep;   // called pause()
    uint32_t arrived;  // wait at the meeting
    uint32_t barred;   // wait at block_sync
    uint32_t gone;     // have returned, or never were
    uint32_t buffer;   // which of two buffers the next meeting uses: late readers may still be at the other one
    Meeting meeting;   // what those that arrived wait for
    uint32_t index;    // in the block's list
    Lane *lanes;       // 32 of them
    uint32_t values[2][WARP];
    Product products[2];
};

struct Block {
    Run *run;
    Warp *warps;
    uint32_t warp_count;
    uint32_t threads;
    uint32_t live;    // threads that have not returned
    uint32_t barred;  // of them, at block_sync
    uint32_t at[3];
    uint32_t grid[3];
    uint8_t *shared;
    uint32_t shared_bytes;
};

extern __thread Lane *current;

extern "C" void hz_switch(void **save, void *to);

// Slow paths, in run.cpp.
void leave(Lane *me);
[[noreturn]] void incomplete(Lane *me, Meeting what);
[[noreturn]] void mixed(Lane *me, Meeting what);
[[noreturn]] void misaligned(const void *p, uint32_t bytes);
void multiply(Product &p);
void block_barrier();
void sleep_lane();
void copy_start(void *shared, const void *global);
void copy_close();
void copy_finish(uint32_t pending);

// Runs another fiber until `me` is ready and its turn has come.
inline void give_way(Lane *me) {
    Warp *w = me->warp;
    if (w->ready == 0) {
        leave(me);
        return;
    }
    const uint32_t after = w->ready & (~1u << me->place);
    Lane *to = w->lanes + __builtin_ctz(after ? after : w->ready);
    current = to;
    hz_switch(&me->sp, to->sp);
}

// Waits until all 32 lanes have come. The last one returns at once, with true, before any other goes on.
inline bool meet(Lane *me, Meeting what) {
    Warp *w = me->warp;
    if (__builtin_expect(w->gone != 0, 0)) incomplete(me, what);
    if (w->arrived == 0) {
        w->meeting = what;
    } else if (__builtin_expect(w->meeting != what, 0)) {
        mixed(me, what);
    }
    w->arrived |= me->bit;
    if (w->arrived == ALL) {
        w->arrived = 0;
        w->buffer ^= 1;
        w->ready = ALL;
        return true;
    }
    w->ready &= ~me->bit;
    give_way(me);
    return false;
}

inline uint32_t exchange(Meeting what, uint32_t value, uint32_t from) {
    Lane *me = current;
    uint32_t *values = me->warp->values[me->warp->buffer];
    values[me->lane] = value;
    meet(me, what);
    return values[from % WARP];
}

}  // namespace hz

// The interface to Rust.
extern "C" {
struct hz_kernel {
    const char *name;
    uint32_t threads;  // most a block may have
    uint32_t blocks;   // that fit on a multiprocessor, by the registers
    size_t args;       // bytes of the argument struct
    void (*call)(const void *args);
};
struct hz_request {
    const hz_kernel *kernel;
    const void *args;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared;
    uint32_t live_blocks;       // at once
    uint32_t reversed;          // threads take turns from the last to the first
    uint32_t patience_ms;       // without progress until a launch counts as hung
    uint64_t fault;             // out: address of a fault, or 0
};
// 0, or 1 with the reason in `message`.
int hz_run(hz_request *request, char *message, size_t capacity);
extern const hz_kernel *const hz_kernels[];
extern const size_t hz_kernel_count;

// Memory between pages that nothing may touch, its end as near to the later one as alignment to 256 bytes allows.
// Null when the system has none.
void *hz_memory_take(size_t bytes);
// Whether the bytes around it, up to the pages, are untouched.
int hz_memory_intact(const void *memory, size_t bytes);
void hz_memory_give(void *memory, size_t bytes);
}
