// Numbers of 4-bit codes, as quire/kernels/nibbles.py has laid them out: eight in a word.
#pragma once
#include "gemm.h"

namespace quire {

// Codes in the lower four bits of each half → two elements, exactly. A code is the last digits of 128 (half: 1,024) + it.
__device__ __forceinline__ uint32_t numbers(uint32_t word, uint32_t point) {
    constexpr uint32_t MAGIC = QUIRE_BF16 ? 0x43004300u : 0x64006400u;
    uint32_t raised, y;  // (word & 0x000F000F) | MAGIC as one instruction: left to the compiler it is two
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(raised) : "r"(word), "n"(0x000F000F), "r"(MAGIC));
#if QUIRE_BF16
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(raised), "r"(point));
#else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(raised), "r"(point));
#endif
    return y;
}
__device__ __forceinline__ uint32_t raised_point(float point) {
    const float raised = point + (QUIRE_BF16 ? 128.0f : 1024.0f);
    return pack(raised, raised);
}
// Codes as two elements that are RAISED too large: those of nibble i and nibble i + 4 of a word. bf16 has room for a
// code in its last digits alone, halves two bits further up, where less is added to it.
constexpr float RAISED = QUIRE_BF16 ? 128.0f : 64.0f;
__device__ __forceinline__ uint32_t raised(uint32_t word, int i) {
    constexpr uint32_t MASK = QUIRE_BF16 ? 0x000F000Fu : 0x00F000F0u, MAGIC = QUIRE_BF16 ? 0x43004300u : 0x54005400u;
    const int shift = QUIRE_BF16 ? 4 * i : 4 * i - 4;
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(shift < 0 ? word << -shift : word >> shift), "n"(MASK), "r"(MAGIC));
    return y;
}
__device__ __forceinline__ uint2 read_pair(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t read_word(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t read_two_bytes(uint32_t address) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t times(uint32_t numbers, uint32_t scale) {
    uint32_t y;
#if QUIRE_BF16
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(numbers), "r"(scale));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(numbers), "r"(scale));
#endif
    return y;
}

}  // namespace quire
