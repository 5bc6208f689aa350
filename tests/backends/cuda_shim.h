// Runs CUDA C on a CPU: a block's threads are fibers, so that barriers and shuffles do what they
// say and everything is deterministic.
//
// A thread runs until it has to wait, then the next one runs, in order or (BACKWARDS) in reverse:
// what a barrier left out would have held apart comes out wrong in one of the two. Blocks run one
// after another on shared memory full of NaN. A barrier or shuffle that not all threads reach, and
// an access to protected memory, end the launch. With FLUSH, subnormal floats are zeros, as under
// -ftz=true.

#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>
#include <xmmintrin.h>

#define __global__
#define __device__
#define __launch_bounds__(threads)
// One section for all shared variables: the linker names its ends.
#define __shared__ static __attribute__((section("shared_memory")))

extern char __start_shared_memory[] __attribute__((weak));
extern char __stop_shared_memory[] __attribute__((weak));

namespace shim {

struct Dim { unsigned x, y, z; };

constexpr int BACKWARDS = 1, FLUSH = 2;
enum { DONE, STUCK, NO_WHOLE_WARPS, BAD_ACCESS };
constexpr unsigned LANES = 32;
constexpr size_t STACK = 256 << 10;

struct Fiber {
    ucontext_t entry;
    jmp_buf here;
    char* stack = nullptr;
    bool started = false, done = false;
};

// A meeting of `expected` threads, over and over; values put in at one meeting stay for the next.
struct Meeting {
    unsigned expected = 0, arrived = 0, round = 0;
    float value[2][LANES];
};

static Dim thread, block, block_dim, grid_dim;
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting barrier;
static jmp_buf scheduler;
static Fiber* running;
static unsigned long progress;
static std::function<void()> body;

inline void yield() {
    if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}

inline void meet(Meeting& m) {
    unsigned round = m.round;
    progress++;
    if (++m.arrived == m.expected) {
        m.arrived = 0;
        m.round++;
        return;
    }
    while (m.round == round) yield();
}

inline float exchange(float value, unsigned with) {
    Meeting& m = warps[thread.x / LANES];
    unsigned round = m.round % 2, lane = thread.x % LANES;
    m.value[round][lane] = value;
    meet(m);
    return m.value[round][with];
}

inline void enter() {
    body();
    running->done = true;
    progress++;
    _longjmp(scheduler, 1);
}

// Lets one fiber run until it waits or ends.
inline void resume(unsigned i) {
    running = &fibers[i];
    thread = {i, 0, 0};
    if (_setjmp(scheduler)) return;
    if (running->started) _longjmp(running->here, 1);
    running->started = true;
    setcontext(&running->entry);
}

// One block; false if some threads wait for others that never come.
inline bool run_block(bool backwards) {
    unsigned count = block_dim.x;
    if (__start_shared_memory) {
        memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    }
    barrier = Meeting();
    barrier.expected = count;
    warps.assign(count / LANES, Meeting());
    for (Meeting& m : warps) m.expected = LANES;
    for (Fiber& f : fibers) {
        f.started = f.done = false;
        getcontext(&f.entry);
        f.entry.uc_stack.ss_sp = f.stack;
        f.entry.uc_stack.ss_size = STACK;
        makecontext(&f.entry, enter, 0);
    }
    for (;;) {
        unsigned long before = progress;
        bool all_done = true;
        for (unsigned i = 0; i < count; i++) {
            unsigned next = backwards ? count - 1 - i : i;
            if (!fibers[next].done) resume(next);
            all_done = all_done && fibers[next].done;
        }
        if (all_done) return true;
        if (progress == before) return false;
    }
}

inline bool run_grid(bool backwards) {
    fibers.resize(block_dim.x);
    for (Fiber& f : fibers) {
        if (!f.stack) f.stack = static_cast<char*>(malloc(STACK));
    }
    unsigned long count = (unsigned long)grid_dim.x * grid_dim.y * grid_dim.z;
    for (unsigned long i = 0; i < count; i++) {
        unsigned long n = backwards ? count - 1 - i : i;
        block = {unsigned(n % grid_dim.x), unsigned(n / grid_dim.x % grid_dim.y),
                 unsigned(n / grid_dim.x / grid_dim.y)};
        if (!run_block(backwards)) return false;
    }
    return true;
}

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Args>>*>(args[I])...);
}

static sigjmp_buf bad_access;

inline void on_bad_access(int) { siglongjmp(bad_access, 1); }

// As cuLaunchKernel: `args[i]` points to the i-th argument.
template <class... Args>
int launch(void (*kernel)(Args...), const unsigned* grid, unsigned threads, void** args,
           int flags) {
    if (threads % LANES) return NO_WHOLE_WARPS;
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {threads, 1, 1};
    body = [=] { call(kernel, args, std::index_sequence_for<Args...>()); };
    unsigned saved = _mm_getcsr();
    if (flags & FLUSH) _mm_setcsr(saved | 0x8040);
    struct sigaction ours = {}, theirs;
    ours.sa_handler = on_bad_access;
    sigaction(SIGSEGV, &ours, &theirs);
    int result = BAD_ACCESS;
    if (!sigsetjmp(bad_access, 1)) result = run_grid(flags & BACKWARDS) ? DONE : STUCK;
    sigaction(SIGSEGV, &theirs, nullptr);
    _mm_setcsr(saved);
    return result;
}

template <class T> std::string type_name() {
    if (std::is_pointer_v<T>) return "pointer";
    if (std::is_same_v<T, float>) return "f32";
    if (std::is_same_v<T, int>) return "i32";
    if (std::is_same_v<T, long long>) return "i64";
    return std::to_string(sizeof(T));
}

template <class... Args> const char* types(void (*)(Args...)) {
    static std::string text;
    text.clear();
    ((text += type_name<Args>() + " "), ...);
    return text.c_str();
}

}  // namespace shim

#define threadIdx shim::thread
#define blockIdx shim::block
#define blockDim shim::block_dim
#define gridDim shim::grid_dim

// What Python calls for a kernel: run it, and the types of its parameters.
#define SHIM_KERNEL(name)                                                                        \
    extern "C" int run_##name(const unsigned* grid, unsigned threads, void** args, int flags) {  \
        return shim::launch(name, grid, threads, args, flags);                                   \
    }                                                                                            \
    extern "C" const char* types_##name() { return shim::types(name); }

inline void __syncthreads() { shim::meet(shim::barrier); }

inline float __shfl_xor_sync(unsigned mask, float value, int with) {
    if (mask != 0xffffffffu) abort();  // the kernels use whole warps only
    return shim::exchange(value, shim::thread.x % shim::LANES ^ unsigned(with));
}

inline int atomicCAS(int* address, int expected, int value) {
    int old = *address;
    if (old == expected) *address = value;
    return old;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
