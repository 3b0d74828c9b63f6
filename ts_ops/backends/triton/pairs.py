"""Pairs of e4m3 columns, which ldmatrix can transpose, for it takes 16 bits at a time; and the numbers in them."""

import triton
import triton.language as tl

# Two pairs in $2, of two keys: the bytes of their even columns to `even`, those of their odd ones to `odd`.
_SORT = """
    prmt.b32 evens, $2, $2, 0x2020;
    prmt.b32 odds, $2, $2, 0x3131;
    cvt.u16.u32 even, evens;
    cvt.u16.u32 odd, odds;
    """
PAIRS_TO_FP16 = tl.constexpr(
    "{ .reg .b32 evens, odds; .reg .b16 even, odd;"
    + _SORT
    + """
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }"""
)
PAIRS_TO_BF16 = tl.constexpr(
    "{ .reg .b32 evens, odds; .reg .b16 even, odd, low, high; .reg .f32 left, right;"
    + _SORT
    + """
    cvt.rn.f16x2.e4m3x2 evens, even;
    cvt.rn.f16x2.e4m3x2 odds, odd;
    mov.b32 {low, high}, evens;
    cvt.f32.f16 left, low;
    cvt.f32.f16 right, high;
    cvt.rn.bf16x2.f32 $0, right, left;
    mov.b32 {low, high}, odds;
    cvt.f32.f16 left, low;
    cvt.f32.f16 right, high;
    cvt.rn.bf16x2.f32 $1, right, left;
    }"""
)


@triton.jit
def even_and_odd(pairs, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """int16 pairs of columns -> their even and their odd columns in fp16 or bf16, exactly.

    Elementwise, so that Triton can do it in the layout that the tensor cores take.
    """
    if not PTX:
        even = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif DTYPE == tl.float16:
        even, odd = tl.inline_asm_elementwise(
            PAIRS_TO_FP16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            PAIRS_TO_BF16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return even, odd
