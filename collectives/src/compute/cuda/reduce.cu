// Reductions and copies on a GPU: what `compute` says that a reduction means, one kernel for each
// element type and operation. `regenerate` compiles this to reduce.ptx, for the oldest GPU that is
// served. It is C as well, so that tests can run the very same arithmetic on a host and hold it
// against the other kernels.
//
// A thread takes a vector of neighbouring elements at a time where all places are aligned to one,
// and single elements otherwise and at the end. Each source is read once and each destination
// written once; a destination may be one of the sources, as a thread has read its elements of all
// of them before it writes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

// Most sources and destinations of one reduction: as in `launch.rs`.
#define SOURCES_MAX 128
#define DESTINATIONS_MAX 64

struct Arguments {
    u64 from[SOURCES_MAX];
    u64 into[DESTINATIONS_MAX];
    u64 elements;
    u32 from_count;
    u32 into_count;
    u32 divide_by;
    u32 is_aligned;
};

#ifdef __CUDACC_RTC__

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name(const struct Arguments given)
#define GIVEN(member) given.member
#define WORKER ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define WORKERS ((u64)gridDim.x * blockDim.x)
#define INLINE static __device__ __forceinline__
#define ALIGNED(bytes) __align__(bytes)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

INLINE u32 float_bits(float value) { return __float_as_uint(value); }
INLINE float bits_float(u32 bits) { return __uint_as_float(bits); }
INLINE u64 double_bits(double value) { return (u64)__double_as_longlong(value); }
INLINE double bits_double(u64 bits) { return __longlong_as_double((i64)bits); }

INLINE float from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

INLINE u16 to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else // a host, one thread at a time

#include <string.h>

u64 pleach_worker, pleach_workers;

#define KERNEL(name) void name(const struct Arguments *given)
#define GIVEN(member) given->member
#define WORKER pleach_worker
#define WORKERS pleach_workers
#define INLINE static inline
#define ALIGNED(bytes) __attribute__((aligned(bytes)))
#define UNROLL
#define ROLLED

INLINE u32 float_bits(float value) { u32 bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE float bits_float(u32 bits) { float value; memcpy(&value, &bits, sizeof value); return value; }
INLINE u64 double_bits(double value) { u64 bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE double bits_double(u64 bits) { double value; memcpy(&value, &bits, sizeof value); return value; }

INLINE float from_f16(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return bits_float(sign | magnitude << 13 | 0xffu << 23);
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * bits_float((127u + 112u) << 23)));
}

INLINE u16 to_f16(float value) {
    const u32 overflow = (127u + 16) << 23, smallest_normal = (127u - 14) << 23, magic = 126u << 23;
    u32 bits = float_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= overflow) return (u16)(sign | (magnitude > 0xffu << 23 ? 0x7e00 : 0x7c00));
    if (magnitude < smallest_normal)
        return (u16)(sign | (float_bits(bits_float(magnitude) + bits_float(magic)) - magic));
    return (u16)(sign | (magnitude - (112u << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13);
}

#endif

// Conversions: rounding to nearest even, a NaN stays one, and what is too large is not clipped.
// Those of 8 bits are not the processor's own, which only newer ones have and which clip.

INLINE float from_bf16(u16 bits) { return bits_float((u32)bits << 16); }

INLINE u16 to_bf16(float value) {
    u32 bits = float_bits(value);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (u16)(value != value ? bits >> 16 | 0x40 : rounded);
}

// Value of an 8-bit float's bits but the sign, a finite one.
INLINE float from_finite_f8(u32 magnitude, u32 bias, u32 mantissa) {
    float subnormal = (float)magnitude * bits_float((127 + 1 - bias - mantissa) << 23);
    float normal = bits_float((magnitude << (23 - mantissa)) + ((127 - bias) << 23));
    return magnitude < 1u << mantissa ? subnormal : normal;
}

// Bits but the sign of the 8-bit float nearest to a value below the overflow.
INLINE u32 to_finite_f8(u32 magnitude, u32 bias, u32 mantissa) {
    u32 shift = 23 - mantissa, magic = (127 - bias + shift + 1) << 23;
    u32 normal =
        (magnitude - ((127 - bias) << 23) + (1u << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift;
    u32 subnormal = float_bits(bits_float(magnitude) + bits_float(magic)) - magic;
    return magnitude < (127 + 1 - bias) << 23 ? subnormal : normal;
}

INLINE float from_f8e4m3(u8 bits) {
    u32 sign = (u32)(bits & 0x80) << 24, magnitude = bits & 0x7f;
    u32 value = magnitude == 0x7f ? 0x7fc00000 : float_bits(from_finite_f8(magnitude, 7, 3));
    return bits_float(sign | value);
}

INLINE u8 to_f8e4m3(float value) {
    u32 bits = float_bits(value), magnitude = bits & 0x7fffffff;
    // 464 is half way between the largest number and what would be the next one; the tie goes to
    // the even 448.
    u32 rounded = magnitude > float_bits(464.0f) ? 0x7f : to_finite_f8(magnitude, 7, 3);
    return (u8)((bits >> 24 & 0x80) | rounded);
}

INLINE float from_f8e5m2(u8 bits) {
    u32 sign = (u32)(bits & 0x80) << 24, magnitude = bits & 0x7f;
    u32 value = magnitude >= 0x7c ? 0xffu << 23 | magnitude << 21 : float_bits(from_finite_f8(magnitude, 15, 2));
    return bits_float(sign | value);
}

INLINE u8 to_f8e5m2(float value) {
    u32 bits = float_bits(value), magnitude = bits & 0x7fffffff;
    // 61,440 is half way between the largest number and what would be the next one; the tie goes to
    // infinity.
    u32 rounded = magnitude >= float_bits(61440.0f) ? (magnitude > 0xffu << 23 ? 0x7e : 0x7c)
                                                    : to_finite_f8(magnitude, 15, 2);
    return (u8)((bits >> 24 & 0x80) | rounded);
}

// Minimum and maximum of floats: NaN if either is, and -0 below +0. `a < b ? a : b` gives b when
// they are equal or one is NaN, so both orders together hold the answer.

INLINE float min_float(float a, float b) {
    float one = a < b ? a : b, two = b < a ? b : a;
    return bits_float(float_bits(one) | float_bits(two));
}

INLINE float max_float(float a, float b) {
    float one = a > b ? a : b, two = b > a ? b : a;
    u32 nan = a != a || b != b ? 0xffffffff : 0;
    return bits_float((float_bits(one) & float_bits(two)) | nan);
}

INLINE double min_double(double a, double b) {
    double one = a < b ? a : b, two = b < a ? b : a;
    return bits_double(double_bits(one) | double_bits(two));
}

INLINE double max_double(double a, double b) {
    double one = a > b ? a : b, two = b > a ? b : a;
    u64 nan = a != a || b != b ? ~0ull : 0;
    return bits_double((double_bits(one) & double_bits(two)) | nan);
}

#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define SAME(value) (value)

struct ALIGNED(16) Words4 {
    u32 words[4];
};

struct ALIGNED(8) Words2 {
    u32 words[2];
};

// A vector of elements, as it is moved and as it is combined.
#define VECTOR(name, type, words, lanes) \
    union name { \
        struct words whole; \
        type values[lanes]; \
    }

VECTOR(VectorOfDouble, double, Words4, 2);
VECTOR(VectorOfFloat, float, Words4, 4);
VECTOR(VectorOf16, u16, Words4, 8);
VECTOR(VectorOf8, u8, Words2, 8);
VECTOR(VectorOfI64, i64, Words4, 2);
VECTOR(VectorOfU64, u64, Words4, 2);
VECTOR(VectorOfI32, i32, Words4, 4);
VECTOR(VectorOfU32, u32, Words4, 4);
VECTOR(VectorOfI16, i16, Words4, 8);
VECTOR(VectorOfI8, i8, Words2, 8);
VECTOR(VectorOfBytes, u8, Words4, 16);

// The sources are elements of `type` in a `vector` of `lanes`, combined as `wide` and divided by a
// `divisor`.
#define REDUCTION(name, type, vector, lanes, wide, widen, narrow, combine, divisor) \
    KERNEL(name) { \
        const u64 elements = GIVEN(elements), workers = WORKERS; \
        u64 first = WORKER; \
        if (GIVEN(is_aligned)) { \
            const u64 vectors = elements / lanes; \
            ROLLED for (u64 at = WORKER; at < vectors; at += workers) { \
                union vector packed; \
                wide folded[lanes]; \
                packed.whole = ((const union vector *)GIVEN(from[0]))[at].whole; \
                UNROLL for (int lane = 0; lane < lanes; ++lane) folded[lane] = widen(packed.values[lane]); \
                ROLLED for (u32 source = 1; source < GIVEN(from_count); ++source) { \
                    packed.whole = ((const union vector *)GIVEN(from[source]))[at].whole; \
                    UNROLL for (int lane = 0; lane < lanes; ++lane) { \
                        wide value = widen(packed.values[lane]); \
                        folded[lane] = combine(folded[lane], value); \
                    } \
                } \
                if (GIVEN(divide_by) > 1) \
                    UNROLL for (int lane = 0; lane < lanes; ++lane) \
                        folded[lane] = (wide)(folded[lane] / (divisor)GIVEN(divide_by)); \
                UNROLL for (int lane = 0; lane < lanes; ++lane) packed.values[lane] = (type)narrow(folded[lane]); \
                ROLLED for (u32 place = 0; place < GIVEN(into_count); ++place) \
                    ((union vector *)GIVEN(into[place]))[at].whole = packed.whole; \
            } \
            first += vectors * lanes; \
        } \
        ROLLED for (u64 at = first; at < elements; at += workers) { \
            wide folded = widen(((const type *)GIVEN(from[0]))[at]); \
            ROLLED for (u32 source = 1; source < GIVEN(from_count); ++source) { \
                wide value = widen(((const type *)GIVEN(from[source]))[at]); \
                folded = combine(folded, value); \
            } \
            if (GIVEN(divide_by) > 1) folded = (wide)(folded / (divisor)GIVEN(divide_by)); \
            ROLLED for (u32 place = 0; place < GIVEN(into_count); ++place) \
                ((type *)GIVEN(into[place]))[at] = (type)narrow(folded); \
        } \
    }

#define FLOAT(name, type, vector, lanes, wide, widen, narrow, kind) \
    REDUCTION(reduce_##name##_sum, type, vector, lanes, wide, widen, narrow, SUM, wide) \
    REDUCTION(reduce_##name##_prod, type, vector, lanes, wide, widen, narrow, PROD, wide) \
    REDUCTION(reduce_##name##_min, type, vector, lanes, wide, widen, narrow, min_##kind, wide) \
    REDUCTION(reduce_##name##_max, type, vector, lanes, wide, widen, narrow, max_##kind, wide)

// Integers wrap, which C says of unsigned ones only: those are added and multiplied, and divided as
// what they are.
#define INTEGER(name, type, vector, lanes, divisor) \
    REDUCTION(reduce_##name##_sum, type, vector, lanes, type, SAME, SAME, sum_##type, divisor) \
    REDUCTION(reduce_##name##_prod, type, vector, lanes, type, SAME, SAME, prod_##type, divisor) \
    REDUCTION(reduce_##name##_min, type, vector, lanes, type, SAME, SAME, MIN, divisor) \
    REDUCTION(reduce_##name##_max, type, vector, lanes, type, SAME, SAME, MAX, divisor)

#define WRAPPING(type, unsigned_type) \
    INLINE type sum_##type(type a, type b) { return (type)((unsigned_type)a + (unsigned_type)b); } \
    INLINE type prod_##type(type a, type b) { return (type)((unsigned_type)a * (unsigned_type)b); }

WRAPPING(i64, u64)
WRAPPING(u64, u64)
WRAPPING(i32, u32)
WRAPPING(u32, u32)
WRAPPING(i16, u32)
WRAPPING(u16, u32)
WRAPPING(i8, u32)
WRAPPING(u8, u32)

FLOAT(f64, double, VectorOfDouble, 2, double, SAME, SAME, double)
FLOAT(f32, float, VectorOfFloat, 4, float, SAME, SAME, float)
FLOAT(f16, u16, VectorOf16, 8, float, from_f16, to_f16, float)
FLOAT(bf16, u16, VectorOf16, 8, float, from_bf16, to_bf16, float)
FLOAT(f8e4m3, u8, VectorOf8, 8, float, from_f8e4m3, to_f8e4m3, float)
FLOAT(f8e5m2, u8, VectorOf8, 8, float, from_f8e5m2, to_f8e5m2, float)
INTEGER(i64, i64, VectorOfI64, 2, i64)
INTEGER(u64, u64, VectorOfU64, 2, u64)
INTEGER(i32, i32, VectorOfI32, 4, i64)
INTEGER(u32, u32, VectorOfU32, 4, u32)
INTEGER(i16, i16, VectorOfI16, 8, i64)
INTEGER(u16, u16, VectorOf16, 8, u32)
INTEGER(i8, i8, VectorOfI8, 8, i64)
INTEGER(u8, u8, VectorOf8, 8, u32)

// Bits, whatever the element is: bytes, four words at a time. With one source it is a copy.
#define BITS(name, operator) \
    KERNEL(name) { \
        const u64 elements = GIVEN(elements), workers = WORKERS; \
        u64 first = WORKER; \
        if (GIVEN(is_aligned)) { \
            const u64 vectors = elements / 16; \
            ROLLED for (u64 at = WORKER; at < vectors; at += workers) { \
                struct Words4 folded = ((const union VectorOfBytes *)GIVEN(from[0]))[at].whole; \
                ROLLED for (u32 source = 1; source < GIVEN(from_count); ++source) { \
                    struct Words4 other = ((const union VectorOfBytes *)GIVEN(from[source]))[at].whole; \
                    UNROLL for (int lane = 0; lane < 4; ++lane) folded.words[lane] operator other.words[lane]; \
                } \
                ROLLED for (u32 place = 0; place < GIVEN(into_count); ++place) \
                    ((union VectorOfBytes *)GIVEN(into[place]))[at].whole = folded; \
            } \
            first += vectors * 16; \
        } \
        ROLLED for (u64 at = first; at < elements; at += workers) { \
            u8 folded = ((const u8 *)GIVEN(from[0]))[at]; \
            ROLLED for (u32 source = 1; source < GIVEN(from_count); ++source) \
                folded operator ((const u8 *)GIVEN(from[source]))[at]; \
            ROLLED for (u32 place = 0; place < GIVEN(into_count); ++place) ((u8 *)GIVEN(into[place]))[at] = folded; \
        } \
    }

BITS(combine_and, &=)
BITS(combine_or, |=)
BITS(combine_xor, ^=)
