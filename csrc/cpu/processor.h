// What is known of the processor beyond its instruction set: only speed depends on it, never a bit of a result.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {

// Whether prefetches help where lines are read in order. From memory, 4 bits, one thread: an AMD family 26 (Zen 5) goes
// from 28 to 32 GB/s, a family 25 (Zen 4) from 30 to 22. Others are left to their hardware.
inline bool gains_by_prefetch_in_order() {
#if defined(__x86_64__)
    static const bool gains = [] {
        constexpr unsigned AMD = 0x68747541, ZEN_5 = 26;  // "Auth" of AuthenticAMD
        unsigned a, b, c, d;
        if (!__get_cpuid(0, &a, &b, &c, &d) || b != AMD || !__get_cpuid(1, &a, &b, &c, &d)) return false;
        return (a >> 8 & 15) + (a >> 20 & 255) >= ZEN_5;
    }();
    return gains;
#else
    return false;
#endif
}

}  // namespace quire
