// What expressions of a variant are made of on CUDA (quire/kernels/attention/variant/lowering.py, target C). One element
// each.
// exp, log, tanh, sigmoid and division use the special-function unit: relative error about 2^-21, tanh 2^-11.
#pragma once

static __device__ __forceinline__ float quire_exp(float x) { return __expf(x); }
static __device__ __forceinline__ float quire_log(float x) { return __logf(x); }
static __device__ __forceinline__ float quire_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
static __device__ __forceinline__ float quire_sqrt(float x) { return sqrtf(x); }
static __device__ __forceinline__ float quire_sin(float x) { return sinf(x); }
static __device__ __forceinline__ float quire_cos(float x) { return cosf(x); }
static __device__ __forceinline__ float quire_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float quire_div(float a, float b) { return __fdividef(a, b); }
static __device__ __forceinline__ float quire_float(int x) { return (float)x; }
static __device__ __forceinline__ bool quire_not(bool a) { return !a; }
static __device__ __forceinline__ bool quire_and(bool a, bool b) { return a & b; }
static __device__ __forceinline__ bool quire_or(bool a, bool b) { return a | b; }
static __device__ __forceinline__ float quire_minimum(float a, float b) { return fminf(a, b); }
static __device__ __forceinline__ float quire_maximum(float a, float b) { return fmaxf(a, b); }
static __device__ __forceinline__ int quire_minimum(int a, int b) { return min(a, b); }
static __device__ __forceinline__ int quire_maximum(int a, int b) { return max(a, b); }
template <class T> static __device__ __forceinline__ T quire_where(bool c, T a, T b) { return c ? a : b; }
template <class T> static __device__ __forceinline__ T quire_load(const T* p, int i) { return __ldg(p + i); }
static __device__ __forceinline__ bool quire_load(const bool* p, int i) { return __ldg((const unsigned char*)p + i); }
static __device__ __forceinline__ int quire_load(const unsigned char* p, int i) { return __ldg(p + i); }
