// What a launch keeps on the host's side: stacks, shared memory, copies in flight.
#pragma once
#include <memory>
#include <vector>

#include "fibers.h"

namespace hz {

// Asynchronous copies of one thread that were started and not waited for; `groups` are ends in `queue`.
struct Copies {
    struct Copy {
        void *to;
        const void *from;
    };
    std::vector<Copy> queue;
    std::vector<size_t> groups;
    void clear() {
        queue.clear();
        groups.clear();
    }
};

// Room for one block at a time.
struct Slot {
    Block block{};
    ~Slot();
    // Whether there is room for so many threads now.
    bool reserve(uint32_t threads);
    // Poisons the shared memory and marks what is around it.
    void prepare(uint32_t threads, uint32_t shared);
    bool shared_intact() const;

  private:
    Warp *warps = nullptr;
    std::unique_ptr<Lane[]> lanes;
    std::unique_ptr<Copies[]> copies;
    uint8_t *stacks = nullptr;
    uint32_t room = 0;  // warps
    uint8_t *shared = nullptr;
};

struct Run {
    hz_request *request;
    char *message;
    size_t capacity;
    bool failed;
    void *host;  // where the host's side stands while fibers run
    std::vector<Slot *> slots;
    uint64_t progress, finished;  // barriers passed and threads ended; blocks ended
    uint64_t seen, seen_finished, idle_rounds;
    double idle_since, finished_at;
};

// The slots of a launch. All launches of the process draw on one store, since each stack takes two of the mappings that
// the system allows a process.
struct Lease {
    std::vector<std::unique_ptr<Slot>> slots;
    // `count` slots for `threads` threads, or none.
    Lease(uint64_t count, uint32_t threads);
    ~Lease();
};

// Turns faults of fibers into failed launches.
void catch_faults();
[[noreturn]] void fault(Lane *me, const char *what);

}  // namespace hz
