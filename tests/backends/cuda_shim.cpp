// Runs CUDA C on a CPU: a block's threads are fibers, so that barriers and shuffles do what they
// say and everything is deterministic.
//
// A thread runs until it has to wait; then of those that can run the first does, or (BACKWARDS) the
// last. Some run as far ahead of the others as barriers let them, so that a missing one comes out
// wrong in one of the two. Blocks run one after another on shared memory full of NaN. A barrier or
// shuffle that not all threads reach, and an access to protected memory, end the launch. With FLUSH,
// subnormal floats are zeros, as under -ftz=true.

#include "cuda_shim.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
#include <xmmintrin.h>

ShimDim threadIdx, blockIdx, blockDim, gridDim;

extern char __start_shared_memory[] __attribute__((weak));
extern char __stop_shared_memory[] __attribute__((weak));

namespace {

constexpr int BACKWARDS = 1, FLUSH = 2;
enum { DONE, STUCK, NO_WHOLE_WARPS, BAD_ACCESS };
constexpr unsigned LANES = 32;
constexpr size_t STACK = 256 << 10;

// A meeting of `expected` threads, over and over. A value stays readable for one more round.
struct Meeting {
    unsigned expected, arrived, round;
    float value[2][LANES];
};

struct Fiber {
    ucontext_t entry;
    jmp_buf here;
    char* stack;
    bool started, done;
    const Meeting* waits_for;  // until it is past `round`
    unsigned round;
};

std::vector<Fiber> fibers;
std::vector<Meeting> warps;
Meeting barrier;
jmp_buf scheduler;
sigjmp_buf bad_access;
Fiber* running;
bool freed;  // some threads need not wait any more
void (*body)(void**);
void** arguments;

void meet(Meeting& m) {
    if (++m.arrived == m.expected) {
        m.arrived = 0;
        m.round++;
        freed = true;
        return;
    }
    running->waits_for = &m;
    running->round = m.round;
    if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}

void enter() {
    body(arguments);
    running->done = true;
    _longjmp(scheduler, 1);
}

bool can_run(const Fiber& f) {
    return !f.done && (!f.waits_for || f.waits_for->round != f.round);
}

// Lets one thread run until it waits or ends.
void resume(unsigned i) {
    running = &fibers[i];
    threadIdx = {i, 0, 0};
    if (_setjmp(scheduler)) return;
    if (running->started) _longjmp(running->here, 1);
    running->started = true;
    setcontext(&running->entry);
}

void prepare_block() {
    if (__start_shared_memory) {
        memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    }
    barrier = Meeting();
    barrier.expected = blockDim.x;
    warps.assign(blockDim.x / LANES, Meeting());
    for (Meeting& m : warps) m.expected = LANES;
    for (unsigned i = 0; i < blockDim.x; i++) {
        Fiber& f = fibers[i];
        f.started = f.done = false;
        f.waits_for = nullptr;
        getcontext(&f.entry);
        f.entry.uc_stack.ss_sp = f.stack;
        f.entry.uc_stack.ss_size = STACK;
        makecontext(&f.entry, enter, 0);
    }
}

// False if some threads wait for others that never come.
bool run_block(bool backwards) {
    prepare_block();
    freed = false;
    unsigned ended = 0;
    for (unsigned i = 0; i < blockDim.x; i++) {
        Fiber& f = fibers[backwards ? blockDim.x - 1 - i : i];
        if (!can_run(f)) continue;
        resume(unsigned(&f - fibers.data()));
        ended += f.done;
        if (freed) {  // from the first one again
            freed = false;
            i = -1u;
        }
    }
    return ended == blockDim.x;
}

bool run_grid(bool backwards) {
    while (fibers.size() < blockDim.x) {
        fibers.push_back({});
        fibers.back().stack = static_cast<char*>(malloc(STACK));
    }
    unsigned long count = (unsigned long)gridDim.x * gridDim.y * gridDim.z;
    for (unsigned long i = 0; i < count; i++) {
        unsigned long n = backwards ? count - 1 - i : i;
        blockIdx = {unsigned(n % gridDim.x), unsigned(n / gridDim.x % gridDim.y),
                    unsigned(n / gridDim.x / gridDim.y)};
        if (!run_block(backwards)) return false;
    }
    return true;
}

void on_bad_access(int) { siglongjmp(bad_access, 1); }

}  // namespace

void shim_barrier() { meet(barrier); }

float shim_exchange(float value, unsigned from_lane) {
    Meeting& m = warps[threadIdx.x / LANES];
    unsigned round = m.round % 2;
    m.value[round][threadIdx.x % LANES] = value;
    meet(m);
    return m.value[round][from_lane];
}

void shim_unsupported(const char* what) {
    fprintf(stderr, "cuda_shim: runtime error: %s\n", what);
    abort();
}

int shim_launch(void (*call)(void**), const unsigned* grid, unsigned threads, void** args,
                int flags) {
    if (threads % LANES) return NO_WHOLE_WARPS;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    body = call;
    arguments = args;
    const unsigned saved = _mm_getcsr();
    if (flags & FLUSH) _mm_setcsr(saved | 0x8040);
    struct sigaction ours = {}, theirs;
    ours.sa_handler = on_bad_access;
    sigaction(SIGSEGV, &ours, &theirs);
    volatile int result = BAD_ACCESS;
    if (!sigsetjmp(bad_access, 1)) result = run_grid(flags & BACKWARDS) ? DONE : STUCK;
    sigaction(SIGSEGV, &theirs, nullptr);
    _mm_setcsr(saved);
    return result;
}
