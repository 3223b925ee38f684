// Launches: blocks are started in order, their fibers take turns, and what can never go on is reported with its place.
#include "run.h"

#include <algorithm>
#include <immintrin.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

namespace hz {

__thread Lane *current = nullptr;

namespace {

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

void say(Run *run, const char *format, va_list rest) {
    if (run->failed) return;
    run->failed = true;
    vsnprintf(run->message, run->capacity, format, rest);
}

__attribute__((format(printf, 2, 3))) void add(Run *run, const char *format, ...) {
    const size_t used = strlen(run->message);
    va_list rest;
    va_start(rest, format);
    vsnprintf(run->message + used, run->capacity - used, format, rest);
    va_end(rest);
}

// Ends the launch from a host thread's side.
__attribute__((format(printf, 2, 3))) void record(Run *run, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    say(run, format, rest);
    va_end(rest);
}

// Ends the launch from a fiber, which never runs again.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Lane *me, const char *format, ...) {
    Block *b = me->block;
    char text[512];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    record(b->run, "kernel %s, block (%u, %u, %u), thread %u: %s", b->run->request->kernel->name, b->at[0], b->at[1],
           b->at[2], me->id, text);
    hz_switch(&me->sp, b->run->host);
    __builtin_unreachable();
}

const char *name(Meeting what) {
    switch (what) {
    case Meeting::Sync: return "warp_sync";
    case Meeting::Shuffle: return "a shuffle";
    case Meeting::Ballot: return "a ballot";
    case Meeting::Product: return "mma_16x8x16";
    }
    return "?";
}

// Threads of a mask as ranges.
void add_threads(Run *run, const Warp &w, uint32_t mask, const char *what) {
    bool there[WARP] = {};
    uint32_t first = 0, count = 0;
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        there[w.lanes[i].lane] = true;
        first = w.lanes[i].id - w.lanes[i].lane;
        ++count;
    }
    if (count == 0) return;
    add(run, " threads");
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!there[i] || (i > 0 && there[i - 1])) continue;
        uint32_t last = i;
        while (last + 1 < WARP && there[last + 1]) ++last;
        last == i ? add(run, " %u", first + i) : add(run, " %u-%u", first + i, first + last);
    }
    add(run, " %s;", what);
}

void describe(Run *run, const Block &b) {
    add(run, " block (%u, %u, %u):", b.at[0], b.at[1], b.at[2]);
    for (uint32_t i = 0; i < b.warp_count && i < 4; ++i) {
        const Warp &w = b.warps[i];
        add_threads(run, w, w.arrived, w.arrived ? name(w.meeting) : "");
        add_threads(run, w, w.barred, "block_sync");
        add_threads(run, w, w.asleep | w.ready, "pause");
        uint32_t gone = 0;
        for (uint32_t j = 0; j < WARP; ++j) gone |= w.lanes[j].id < b.threads ? w.gone & w.lanes[j].bit : 0;
        add_threads(run, w, gone, "returned");
    }
    if (b.warp_count > 4) add(run, " ...");
}

void stuck(Run *run, const char *how) {
    record(run, "kernel %s %s:", run->request->kernel->name, how);
    uint32_t shown = 0;
    for (Slot *s : run->slots) {
        if (s->block.live && shown++ < 3) describe(run, s->block);
    }
    if (shown > 3) add(run, " and %u more blocks", shown - 3);
}

void release(Block *b) {
    for (uint32_t i = 0; i < b->warp_count; ++i) {
        b->warps[i].ready |= b->warps[i].barred;
        b->warps[i].barred = 0;
    }
    b->barred = 0;
    b->run->progress++;
}

[[noreturn]] void finish(Lane *me) {
    Block *b = me->block;
    Warp *w = me->warp;
    if (!me->copies->queue.empty()) fail(me, "returns with %zu asynchronous copies not waited for", me->copies->queue.size());
    if (w->arrived) {
        fail(me, "returns while other threads of its warp wait for it at %s", name(w->meeting));
    }
    w->ready &= ~me->bit;
    w->gone |= me->bit;
    b->live--;
    b->run->progress++;
    if (b->live == 0) {
        b->run->finished++;
        hz_switch(&me->sp, b->run->host);
    }
    if (b->barred == b->live) release(b);
    leave(me);
    __builtin_unreachable();
}

// The first function of each fiber.
void enter() {
    Lane *me = current;
    const hz_request *r = me->block->run->request;
    r->kernel->call(r->args);
    finish(current);
}

// Which lane of the block runs next, or null when none can.
Lane *wake(Block &b) {
    Lane *first = nullptr;
    for (uint32_t i = 0; i < b.warp_count; ++i) {
        Warp &w = b.warps[i];
        w.ready |= w.asleep;
        w.asleep = 0;
        if (!first && w.ready) first = w.lanes + __builtin_ctz(w.ready);
    }
    return first;
}

void start(Slot &s, Run *run, uint64_t number) {
    const hz_request *r = run->request;
    Block &b = s.block;
    b.run = run;
    b.threads = b.live = r->threads;
    b.barred = 0;
    b.at[0] = number % r->grid[0];
    b.at[1] = number / r->grid[0] % r->grid[1];
    b.at[2] = number / r->grid[0] / r->grid[1];
    memcpy(b.grid, r->grid, sizeof b.grid);
    s.prepare(r->threads, r->shared);
    for (uint32_t i = 0; i < b.warp_count; ++i) {
        Warp &w = b.warps[i];
        w.ready = w.asleep = w.arrived = w.barred = w.gone = w.buffer = 0;
        const uint32_t first = (r->reversed ? b.warp_count - 1 - i : i) * WARP;
        for (uint32_t j = 0; j < WARP; ++j) {
            Lane &l = w.lanes[j];
            l.lane = r->reversed ? WARP - 1 - j : j;
            l.id = first + l.lane;
            (l.id < r->threads ? w.ready : w.gone) |= l.bit;
            l.copies->clear();
            // What hz_switch restores: six registers, then where to go; above them, no caller.
            void **frame = (void **)(l.stack_top - 64);
            memset(frame, 0, 64);
            frame[6] = (void *)enter;
            l.sp = frame;
        }
    }
}

// Runs `b` until nothing in it can.
void visit(Run *run, Lane *first) {
    current = first;
    hz_switch(&run->host, first->sp);
    current = nullptr;
}

// Whether the launch goes on after a round in which every block had to wait.
bool patient(Run *run) {
    if (run->progress != run->seen) {
        run->seen = run->progress;
        run->idle_rounds = 0;
        run->idle_since = 0;
    }
    if (run->finished != run->seen_finished) {
        run->seen_finished = run->finished;
        run->finished_at = 0;
    }
    if (++run->idle_rounds % 256) return true;
    sched_yield();
    if (run->idle_rounds > 4096) usleep(50);
    const double now = now_ms(), limit = run->request->patience_ms;
    if (run->idle_since == 0) run->idle_since = now;
    if (run->finished_at == 0) run->finished_at = now;
    if (now - run->idle_since > limit || now - run->finished_at > 10 * limit) {
        stuck(run, "does not get on: it waits for something that nobody does");
        return false;
    }
    return true;
}

void blocks(Run *run) {
    const hz_request *r = run->request;
    const uint64_t total = (uint64_t)r->grid[0] * r->grid[1] * r->grid[2];
    uint64_t next = 0, live = 0;
    while (!run->failed) {
        for (Slot *s : run->slots) {
            if (s->block.live || next == total) continue;
            start(*s, run, next++);
            live++;
        }
        if (live == 0) return;
        bool ran = false;
        for (Slot *s : run->slots) {
            Block &b = s->block;
            Lane *first = b.live ? wake(b) : nullptr;
            if (!first) continue;
            ran = true;
            visit(run, first);
            if (run->failed) return;
            if (b.live) continue;
            live--;
            if (!s->shared_intact()) {
                record(run, "kernel %s, block (%u, %u, %u) wrote outside its %u bytes of shared memory", r->kernel->name,
                       b.at[0], b.at[1], b.at[2], r->shared);
                return;
            }
        }
        if (!ran) return stuck(run, "can never end");
        if (!patient(run)) return;
    }
}

}  // namespace

void leave(Lane *me) {
    Block *b = me->block;
    const uint32_t own = me->warp->index;
    for (uint32_t i = 1; i <= b->warp_count; ++i) {
        const uint32_t at = own + i < b->warp_count ? own + i : own + i - b->warp_count;
        Warp &w = b->warps[at];
        if (!w.ready) continue;
        Lane *to = w.lanes + __builtin_ctz(w.ready);
        current = to;
        hz_switch(&me->sp, to->sp);
        return;
    }
    hz_switch(&me->sp, b->run->host);
}

void incomplete(Lane *me, Meeting what) {
    uint32_t absent = 0;
    for (uint32_t i = 0; i < WARP; ++i) absent |= me->warp->lanes[i].id >= me->block->threads;
    if (absent) fail(me, "calls %s in a warp of less than 32 threads", name(what));
    fail(me, "calls %s, but %d threads of its warp have returned", name(what), __builtin_popcount(me->warp->gone));
}

void mixed(Lane *me, Meeting what) {
    fail(me, "calls %s while other threads of its warp wait at %s", name(what), name(me->warp->meeting));
}

void misaligned(const void *p, uint32_t bytes) {
    fail(current, "address %p is not a multiple of the %u bytes accessed", p, bytes);
}

void fault(Lane *me, const char *what) { fail(me, "%s", what); }

void block_barrier() {
    Lane *me = current;
    Block *b = me->block;
    if (++b->barred == b->live) {
        release(b);
        return;
    }
    me->warp->ready &= ~me->bit;
    me->warp->barred |= me->bit;
    give_way(me);
}

void sleep_lane() {
    Lane *me = current;
    me->warp->ready &= ~me->bit;
    me->warp->asleep |= me->bit;
    give_way(me);
}

void copy_start(void *shared, const void *global) {
    Lane *me = current;
    if ((uintptr_t)shared % 16) misaligned(shared, 16);
    if ((uintptr_t)global % 16) misaligned(global, 16);
    const Block &b = *me->block;
    const uint8_t *to = (const uint8_t *)shared;
    if (to < b.shared || to + 16 > b.shared + b.shared_bytes) fail(me, "asynchronous copy to outside shared memory");
    memset(shared, 0xff, 16);
    me->copies->queue.push_back({shared, global});
}

void copy_close() { current->copies->groups.push_back(current->copies->queue.size()); }

void copy_finish(uint32_t pending) {
    Copies &c = *current->copies;
    if (c.groups.size() <= pending) return;
    const size_t groups = c.groups.size() - pending;
    const size_t copies = c.groups[groups - 1];
    for (size_t i = 0; i < copies; ++i) memcpy(c.queue[i].to, c.queue[i].from, 16);
    c.queue.erase(c.queue.begin(), c.queue.begin() + copies);
    c.groups.erase(c.groups.begin(), c.groups.begin() + groups);
    for (size_t &end : c.groups) end -= copies;
}

void multiply(Product &p) {
    alignas(32) float a[16][16], b[16][8], d[16][8];
    for (uint32_t lane = 0; lane < WARP; ++lane) {
        const uint32_t g = lane / 4, t = 2 * (lane % 4);
        // Eight FP16 of a, four of b, in the order of the registers.
        alignas(16) uint32_t halves[4];
        alignas(32) float wide[8], narrow[8];
        memcpy(halves, p.a[lane], 16);
        _mm256_store_ps(wide, _mm256_cvtph_ps(_mm_load_si128((const __m128i *)halves)));
        memcpy(halves, p.b[lane], 8);
        _mm256_store_ps(narrow, _mm256_cvtph_ps(_mm_load_si128((const __m128i *)halves)));
        for (uint32_t i = 0; i < 2; ++i) {
            a[g][t + i] = wide[i];
            a[g + 8][t + i] = wide[2 + i];
            a[g][t + 8 + i] = wide[4 + i];
            a[g + 8][t + 8 + i] = wide[6 + i];
            b[t + i][g] = narrow[i];
            b[t + 8 + i][g] = narrow[2 + i];
            d[g][t + i] = p.d[lane][i];
            d[g + 8][t + i] = p.d[lane][2 + i];
        }
    }
    for (uint32_t row = 0; row < 16; ++row) {
        __m256 sum = _mm256_load_ps(d[row]);
        for (uint32_t k = 0; k < 16; ++k) {
            sum = _mm256_fmadd_ps(_mm256_set1_ps(a[row][k]), _mm256_load_ps(b[k]), sum);
        }
        _mm256_store_ps(d[row], sum);
    }
    for (uint32_t lane = 0; lane < WARP; ++lane) {
        const uint32_t g = lane / 4, t = 2 * (lane % 4);
        for (uint32_t i = 0; i < 2; ++i) {
            p.d[lane][i] = d[g][t + i];
            p.d[lane][2 + i] = d[g + 8][t + i];
        }
    }
}

}  // namespace hz

int hz_run(hz_request *request, char *message, size_t capacity) {
    hz::catch_faults();
    message[0] = 0;
    request->fault = 0;
    hz::Run run{};
    run.request = request;
    run.message = message;
    run.capacity = capacity;
    const uint64_t total = (uint64_t)request->grid[0] * request->grid[1] * request->grid[2];
    const hz::Lease lease(std::min<uint64_t>(total, request->live_blocks), request->threads);
    for (const auto &slot : lease.slots) run.slots.push_back(slot.get());
    if (run.slots.empty()) {
        snprintf(message, capacity, "the emulator has no memory for the threads of %s", request->kernel->name);
        return 1;
    }
    hz::blocks(&run);
    return run.failed;
}

// Registers that a called function must keep, and the stack.
asm(R"(
.text
.globl hz_switch
.type hz_switch, @function
.p2align 5
hz_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size hz_switch, .-hz_switch
)");
