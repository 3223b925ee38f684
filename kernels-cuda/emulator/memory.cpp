// Memory that notices being left: stacks, shared memory and device memory, each before a page that nothing may touch;
// and what happens when something does.
#include <mutex>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "run.h"

namespace hz {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t STACK = 64 << 10;
constexpr size_t SHARED = 256 << 10;
constexpr uint8_t MARK = 0xa5;
constexpr size_t MARKED = 256;  // bytes below a block's shared memory

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

uint8_t *map(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (uint8_t *)p;
}

bool marked(const uint8_t *from, const uint8_t *to) {
    for (; from < to; ++from) {
        if (*from != MARK) return false;
    }
    return true;
}

struct sigaction before[NSIG];

void on_fault(int signal, siginfo_t *info, void *context) {
    Lane *me = current;
    if (!me) {
        // Not a kernel's: as it would have been without us.
        sigaction(signal, &before[signal], nullptr);
        return;
    }
    ucontext_t *at = (ucontext_t *)context;
    greg_t *registers = at->uc_mcontext.gregs;
    static __thread char what[160];
    const uint64_t address = (uint64_t)info->si_addr;
    if (signal == SIGFPE) {
        snprintf(what, sizeof what, "divides an integer by zero");
    } else if (signal == SIGILL) {
        snprintf(what, sizeof what, "reached code that the compiler holds for unreachable");
    } else if (address >= (uint64_t)me->stack_top - STACK - PAGE && address < (uint64_t)me->stack_top) {
        snprintf(what, sizeof what, "uses more than %zu KB of stack", STACK >> 10);
    } else {
        const char *how = registers[REG_ERR] & 2 ? "writes to" : "reads from";
        snprintf(what, sizeof what, "%s address %#llx, which is nobody's memory", how, (unsigned long long)address);
        me->block->run->request->fault = address;
    }
    // The fiber goes on in fault(), on an empty stack.
    registers[REG_RDI] = (greg_t)me;
    registers[REG_RSI] = (greg_t)what;
    registers[REG_RSP] = (greg_t)(me->stack_top - 72);
    registers[REG_RIP] = (greg_t)fault;
}

}  // namespace

void catch_faults() {
    static const bool once = [] {
        struct sigaction action {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, &before[signal]);
        return true;
    }();
    (void)once;
    static thread_local bool here = false;
    if (here) return;
    here = true;
    stack_t old;
    if (sigaltstack(nullptr, &old) == 0 && (old.ss_flags & SS_DISABLE)) {
        stack_t mine{};
        mine.ss_size = 64 << 10;
        mine.ss_sp = map(mine.ss_size);
        if (mine.ss_sp) sigaltstack(&mine, nullptr);
    }
}

Slot::~Slot() {
    if (stacks) munmap(stacks, (size_t)room * WARP * STACK);
    if (shared) munmap(shared, SHARED + PAGE);
    free(warps);
}

bool Slot::reserve(uint32_t threads) {
    const uint32_t count = (threads + WARP - 1) / WARP;
    if (!shared) {
        uint8_t *p = map(SHARED + PAGE);
        if (!p) return false;
        mprotect(p + SHARED, PAGE, PROT_NONE);
        shared = p;
    }
    if (count <= room) return true;
    uint8_t *p = map((size_t)count * WARP * STACK);
    Warp *w = (Warp *)aligned_alloc(alignof(Warp), count * sizeof(Warp));
    if (!p || !w) {
        if (p) munmap(p, (size_t)count * WARP * STACK);
        free(w);
        return false;
    }
    if (stacks) munmap(stacks, (size_t)room * WARP * STACK);
    free(warps);
    stacks = p;
    warps = w;
    room = count;
    lanes.reset(new Lane[count * WARP]());
    copies.reset(new Copies[count * WARP]);
    for (uint32_t i = 0; i < count * WARP; ++i) {
        uint8_t *stack = stacks + (size_t)i * STACK;
        mprotect(stack, PAGE, PROT_NONE);
        Lane &l = lanes[i];
        l.place = i % WARP;
        l.bit = 1u << l.place;
        l.block = &block;
        l.warp = warps + i / WARP;
        l.copies = &copies[i];
        // Tops at different offsets within a page, or the frames of a warp would fight for the same cache sets.
        l.stack_top = stack + STACK - (i * 5 % 64) * 64;
    }
    for (uint32_t i = 0; i < count; ++i) {
        memset(&warps[i], 0, sizeof(Warp));
        warps[i].index = i;
        warps[i].lanes = &lanes[i * WARP];
    }
    return true;
}

void Slot::prepare(uint32_t threads, uint32_t bytes) {
    block.warps = warps;
    block.warp_count = (threads + WARP - 1) / WARP;
    block.shared_bytes = bytes;
    block.shared = shared + SHARED - round_up(bytes, 128);
    memset(block.shared - MARKED, MARK, MARKED);
    memset(block.shared, 0xff, bytes);
    memset(block.shared + bytes, MARK, shared + SHARED - (block.shared + bytes));
}

bool Slot::shared_intact() const {
    return marked(block.shared - MARKED, block.shared) && marked(block.shared + block.shared_bytes, shared + SHARED);
}

namespace {
std::mutex store_lock;
std::vector<std::unique_ptr<Slot>> store;
}  // namespace

Lease::Lease(uint64_t count, uint32_t threads) {
    {
        std::lock_guard<std::mutex> hold(store_lock);
        for (; slots.size() < count && !store.empty(); store.pop_back()) slots.push_back(std::move(store.back()));
    }
    while (slots.size() < count) slots.emplace_back(new Slot);
    for (auto &slot : slots) {
        slot->block.live = 0;
        if (!slot->reserve(threads)) {
            slots.clear();
            return;
        }
    }
}

Lease::~Lease() {
    std::lock_guard<std::mutex> hold(store_lock);
    for (auto &slot : slots) store.push_back(std::move(slot));
}

}  // namespace hz

using hz::map;
using hz::PAGE;

// [page][marks][bytes][marks up to 256][page]
void *hz_memory_take(size_t bytes) {
    const size_t aligned = hz::round_up(bytes, 256), inner = hz::round_up(aligned, PAGE);
    uint8_t *p = map(inner + 2 * PAGE);
    if (!p) return nullptr;
    mprotect(p, PAGE, PROT_NONE);
    mprotect(p + PAGE + inner, PAGE, PROT_NONE);
    uint8_t *data = p + PAGE + inner - aligned;
    memset(p + PAGE, hz::MARK, inner - aligned);
    memset(data + bytes, hz::MARK, aligned - bytes);
    return data;
}

int hz_memory_intact(const void *memory, size_t bytes) {
    const size_t aligned = hz::round_up(bytes, 256), inner = hz::round_up(aligned, PAGE);
    const uint8_t *data = (const uint8_t *)memory;
    return hz::marked(data - (inner - aligned), data) && hz::marked(data + bytes, data + aligned);
}

void hz_memory_give(void *memory, size_t bytes) {
    const size_t aligned = hz::round_up(bytes, 256), inner = hz::round_up(aligned, PAGE);
    munmap((uint8_t *)memory - (inner - aligned) - PAGE, inner + 2 * PAGE);
}
