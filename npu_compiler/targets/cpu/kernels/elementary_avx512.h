// Elementary functions on lane vectors of floats for AVX-512: half to a fifth of the instructions of those in
// elementary_portable.h, because a register or two hold a table. math.h includes this.
#pragma once

namespace npu {

// Returns the entries of a row of 32 or 16 numbers, by the last five or four bits of an index.
NPU_INLINE vf look_up(const float (&row)[32], vi32 at) {
  return (vf)_mm512_permutex2var_ps(_mm512_load_ps(row), (__m512i)at, _mm512_load_ps(row + 16));
}
NPU_INLINE vf look_up(const float (&row)[16], vi32 at) {
  return (vf)_mm512_permutexvar_ps((__m512i)at, _mm512_load_ps(row));
}

// Returns 1 / x with 23 bits, for a normal x whose reciprocal is one. Newton's method doubles the 14 bits of the
// instruction, which takes an eighth of the time of a division.
NPU_INLINE vf near_reciprocal(vf x) {
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return fused(y, fused(-x, y, splat<vf>(1)), y);
}
// The smaller operand; NaN if x is NaN.
NPU_INLINE vf at_most(float limit, vf x) { return (vf)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x); }

// ---------------------------------------------------------------------------------------------- exponentials
// 2^(n/32) as head and tail (tools/fit_math.py).
alignas(64) constexpr float EXP_TABLE[2][32] = {{0x1p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f,
    0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f, 0x1.29e9ep+0f, 0x1.306fep+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f,
    0x1.44e086p+0f, 0x1.4bfdaep+0f, 0x1.5342b6p+0f, 0x1.5ab07ep+0f, 0x1.6247ecp+0f, 0x1.6a09e6p+0f, 0x1.71f75ep+0f,
    0x1.7a1148p+0f, 0x1.82589ap+0f, 0x1.8ace54p+0f, 0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f, 0x1.ae89fap+0f,
    0x1.b7f77p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f, 0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f},
    {0x0p+0f, -0x1.9d4f52p-25f, 0x1.9f3122p-25f, -0x1.fdb496p-25f, -0x1.c15742p-27f, -0x1.d2e8cap-25f,
    0x1.ceac48p-25f, -0x1.5c0424p-25f, 0x1.4636e2p-25f, -0x1.18aac6p-25f, 0x1.824684p-25f, 0x1.8624b4p-30f,
    -0x1.593abcp-25f, -0x1.2c561p-25f, -0x1.5bd5ecp-27f, -0x1.f8b55p-25f, 0x1.9fcef4p-26f, 0x1.1d8beep-25f,
    -0x1.829fdp-25f, -0x1.accc7cp-26f, 0x1.15506ep-27f, -0x1.e64744p-25f, 0x1.51f848p-27f, -0x1.b83b54p-25f,
    -0x1.a94b14p-26f, -0x1.a09438p-25f, -0x1.3d56b2p-27f, -0x1.8837ccp-27f, -0x1.822dbcp-27f, -0x1.908c94p-25f,
    0x1.52486cp-27f, -0x1.246ebp-26f}};

NPU_INLINE vf exp(vf x) {  // x = n ln(2)/32 + r
  // A result that is subnormal or rounded to 0 takes Intel's CPUs more than 100 cycles, and masked scores are many.
  const __mmask16 nonzero = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-0x1.9fe368p6f), _CMP_NLT_UQ);
  x = at_most(89.f, x);
  vf whole;
  const vi32 n = nearest_int(x * (32 * LOG2_E), &whole);
  const vf r = fused(whole, splat<vf>(-LN2_LO / 32), fused(whole, splat<vf>(-LN2_HI / 32), x));
  const vf p = fma(r * r, fma(r, splat<vf>(1.f / 6), splat<vf>(0.5f)), r), head = look_up(EXP_TABLE[0], n);
  const vf y = head + fma(head, p, look_up(EXP_TABLE[1], n));
  return (vf)_mm512_maskz_scalef_ps(nonzero, (__m512)y, (__m512)(whole * (1.f / 32)));  // rounds the exponent down
}

// Returns the sum of the value at the centre of an interval and of (a - centre) P(a - centre); below 1/8, of a and a P(a).
NPU_INLINE vf by_centre(vf a, vi32 interval, const float (&table)[7][32]) {
  const auto entry = [&](int row) NPU_HALF { return look_up(table[row], interval); };
  const vf t = a - entry(0), value = select(a < 0.125f, a, entry(1));
  vf p = entry(6);
  for (int i = 5; i >= 2; i--) p = fma(p, t, entry(i));
  return fma(p, t, value);
}

// For intervals of a = |x| that are 1/8 wide: centre, value and coefficients (tools/fit_math.py).
alignas(64) constexpr float ERF_TABLE[7][32] = {{0x0p+0f, 0x1.81f2p-3f, 0x1.419c4p-2f, 0x1.c048p-2f, 0x1.20016p-1f,
    0x1.5faa2p-1f, 0x1.9f738p-1f, 0x1.df622p-1f, 0x1.1077ap+0f, 0x1.300a1p+0f, 0x1.4fd2dp+0f, 0x1.705f9p+0f,
    0x1.9077p+0f, 0x1.afedcp+0f, 0x1.d0509p+0f, 0x1.efa26p+0f, 0x1.0802p+1f, 0x1.182efp+1f, 0x1.2836cp+1f,
    0x1.382c48p+1f, 0x1.47cf4p+1f, 0x1.57ea2p+1f, 0x1.67f47p+1f, 0x1.781888p+1f, 0x1.87eb8p+1f, 0x1.98282p+1f,
    0x1.a80698p+1f, 0x1.b7c18p+1f, 0x1.c7c18p+1f, 0x1.d83e8p+1f, 0x1.e83e8p+1f, 0x1.f83e8p+1f}, {0x0p+0f,
    0x1.ae645p-3f, 0x1.5f4fa4p-2f, 0x1.db4b32p-2f, 0x1.25b9cap-1f, 0x1.5655d6p-1f, 0x1.7f67cp-1f, 0x1.a10b0cp-1f,
    0x1.bc4632p-1f, 0x1.d05d96p-1f, 0x1.df73bp-1f, 0x1.ea9272p-1f, 0x1.f233eep-1f, 0x1.f7480ap-1f, 0x1.fab7a8p-1f,
    0x1.fcd5d6p-1f, 0x1.fe30ap-1f, 0x1.fefe92p-1f, 0x1.ff7464p-1f, 0x1.ffb644p-1f, 0x1.ffd9a8p-1f, 0x1.ffed04p-1f,
    0x1.fff6dap-1f, 0x1.fffbbep-1f, 0x1.fffe0cp-1f, 0x1.ffff26p-1f, 0x1.ffffa2p-1f, 0x1.ffffd8p-1f, 0x1.fffffp-1f,
    0x1.fffffap-1f, 0x1.fffffep-1f, 0x1p+0f}, {0x1.06eba8p-3f, 0x1.16c95ap+0f, 0x1.05bb3p+0f, 0x1.dcf92p-1f,
    0x1.a50608p-1f, 0x1.6873p-1f, 0x1.2b12f8p-1f, 0x1.e0dfaep-2f, 0x1.743678p-2f, 0x1.19f372p-2f, 0x1.9d7518p-3f,
    0x1.236e24p-3f, 0x1.8ffffep-4f, 0x1.0c39fep-4f, 0x1.587ee8p-5f, 0x1.b37d46p-6f, 0x1.069d26p-6f, 0x1.32e9c4p-7f,
    0x1.5d3ca4p-8f, 0x1.822c94p-9f, 0x1.a35358p-10f, 0x1.b155a8p-11f, 0x1.b31732p-12f, 0x1.a564d6p-13f,
    0x1.91651p-14f, 0x1.6b4a6cp-15f, 0x1.44834ap-16f, 0x1.1b3406p-17f, 0x1.d873bp-19f, 0x1.735ca2p-20f,
    0x1.22b754p-21f, 0x1.b929c6p-23f}, {0x1.a79d88p-23f, -0x1.a44c46p-3f, -0x1.48cf6ap-2f, -0x1.a19dp-2f,
    -0x1.d9a8fep-2f, -0x1.ef252ap-2f, -0x1.e55aa8p-2f, -0x1.c23d6cp-2f, -0x1.8c27dp-2f, -0x1.4edc32p-2f,
    -0x1.0f306p-2f, -0x1.a35b2ap-3f, -0x1.38dd02p-3f, -0x1.c48ecep-4f, -0x1.38693ep-4f, -0x1.a591bep-5f,
    -0x1.0ed41ap-5f, -0x1.4fe7e8p-6f, -0x1.9418bp-7f, -0x1.d6e8e2p-8f, -0x1.0c7944p-8f, -0x1.2312bap-9f,
    -0x1.31e20ap-10f, -0x1.3589a6p-11f, -0x1.33409p-12f, -0x1.219ae4p-13f, -0x1.0cbfe4p-14f, -0x1.e67a1cp-16f,
    -0x1.a48b1ap-17f, -0x1.568478p-18f, -0x1.15381p-19f, -0x1.b27704p-21f}, {-0x1.812a72p-2f, -0x1.595062p-2f,
    -0x1.18210cp-2f, -0x1.88342cp-3f, -0x1.9c39dap-4f, -0x1.b25d1ep-7f, 0x1.f95de2p-5f, 0x1.e2fd1p-4f,
    0x1.3a0b04p-3f, 0x1.564bdep-3f, 0x1.5082f8p-3f, 0x1.3125ep-3f, 0x1.039cb6p-3f, 0x1.a3a266p-4f, 0x1.405656p-4f,
    0x1.d78b2cp-5f, 0x1.48a1a4p-5f, 0x1.b707e6p-6f, 0x1.1a9cb4p-6f, 0x1.5ea4d2p-7f, 0x1.a76ffp-8f, 0x1.e54502p-9f,
    0x1.0c9a4cp-9f, 0x1.1d9b7p-10f, 0x1.28de9p-11f, 0x1.24aebap-12f, 0x1.1b3e28p-13f, 0x1.0ac59ep-14f,
    0x1.df79c6p-16f, 0x1.95bc94p-17f, 0x1.54582ep-18f, 0x1.140c74p-19f}, {0x1.00691cp-12f, 0x1.99b2b8p-4f,
    0x1.32b976p-3f, 0x1.6bbec4p-3f, 0x1.754728p-3f, 0x1.5312f8p-3f, 0x1.101fc6p-3f, 0x1.76285ep-4f, 0x1.845b18p-5f,
    0x1.42a77p-7f, -0x1.3da3f4p-6f, -0x1.3e350ap-5f, -0x1.8a6714p-5f, -0x1.95d80cp-5f, -0x1.7479c4p-5f,
    -0x1.3bdcd8p-5f, -0x1.f1564cp-6f, -0x1.70bc5p-6f, -0x1.03e78cp-6f, -0x1.5d944cp-7f, -0x1.c5871ep-8f,
    -0x1.1611bcp-8f, -0x1.4794cap-9f, -0x1.712fdap-10f, -0x1.94c484p-11f, -0x1.a4277ep-12f, -0x1.aa62b6p-13f,
    -0x1.a3e656p-14f, -0x1.8a0662p-15f, -0x1.5bf554p-16f, -0x1.2f9ecap-17f, -0x1.ff8298p-19f}, {0x1.c73bc6p-4f,
    0x1.7faa7ap-4f, 0x1.04401ap-4f, 0x1.b02bcep-6f, -0x1.62785ap-7f, -0x1.54b0acp-5f, -0x1.f93532p-5f,
    -0x1.1cc392p-4f, -0x1.0f277ap-4f, -0x1.c09214p-5f, -0x1.3f5828p-5f, -0x1.6fdca2p-6f, -0x1.0741a8p-7f,
    0x1.650ee8p-9f, 0x1.36aa1ep-7f, 0x1.9cb24ep-7f, 0x1.a9c12cp-7f, 0x1.7e557ep-7f, 0x1.37f58ep-7f, 0x1.d82f8ep-8f,
    0x1.4fb3bap-8f, 0x1.c25c6ap-9f, 0x1.1ef66p-9f, 0x1.5c5424p-10f, 0x1.94bb18p-11f, 0x1.c1296p-12f, 0x1.df1dbp-13f,
    0x1.eb44d6p-14f, 0x1.e34b3ep-15f, 0x1.c79b44p-16f, 0x1.9f065cp-17f, 0x1.6c2f5ep-18f}};

NPU_INLINE vf erf(vf x) {
  const vf a = at_most(0x1.fffffep1f, abs(x));  // erf(4) is 1
  return copysign(by_centre(a, (vi32)_mm512_cvttps_epi32((__m512)(a * 8.f)), ERF_TABLE), x);
}

// For numbers a = |x| of one exponent and two more bits of the fraction: the same.
alignas(64) constexpr float TANH_TABLE[7][32] = {{0x1.202ec8p+1f, 0x1.6029cp+1f, 0x1.a01c78p+1f, 0x1.e02f1p+1f,
    0x1.2008c8p+2f, 0x1.5ff754p+2f, 0x1.9fef28p+2f, 0x1.e01f4p+2f, 0x1.11a93ap+3f, 0x1.600fap+3f, 0x1.a00fap+3f,
    0x1.e00fap+3f, 0x0p+0f, 0x0p+0f, 0x0p+0f, 0x0p+0f, 0x1.1d1p-3f, 0x1.62638p-3f, 0x1.9c5ep-3f, 0x1.dfbc8p-3f,
    0x1.2056cp-2f, 0x1.6041cp-2f, 0x1.a1798p-2f, 0x1.df2ap-2f, 0x1.208bap-1f, 0x1.5fb8ep-1f, 0x1.a0e78p-1f,
    0x1.dfcaap-1f, 0x1.1fd5ap+0f, 0x1.60545p+0f, 0x1.9fd03p+0f, 0x1.e04a3p+0f}, {0x1.f4c7f6p-1f, 0x1.fbd7bep-1f,
    0x1.fe7728p-1f, 0x1.ff6f82p-1f, 0x1.ffdfbp-1f, 0x1.fffb9ep-1f, 0x1.ffff68p-1f, 0x1.ffffecp-1f, 0x1.fffffep-1f,
    0x1p+0f, 0x1p+0f, 0x1p+0f, 0x0p+0f, 0x0p+0f, 0x0p+0f, 0x0p+0f, 0x1.1b3c58p-3f, 0x1.5ee4b2p-3f, 0x1.96e222p-3f,
    0x1.d7267p-3f, 0x1.18f3d4p-2f, 0x1.52fd52p-2f, 0x1.8bc92ap-2f, 0x1.bf0142p-2f, 0x1.056fb6p-1f, 0x1.312a08p-1f,
    0x1.58082p-1f, 0x1.77bf9ap-1f, 0x1.9e3f74p-1f, 0x1.c29eb2p-1f, 0x1.d9b93ap-1f, 0x1.e885eep-1f}, {0x1.631258p-5f,
    0x1.08fbfap-6f, 0x1.88414cp-8f, 0x1.20d33ap-9f, 0x1.0277dep-11f, 0x1.187eccp-14f, 0x1.2fffc2p-17f, 0x1.4735bap-20f,
    0x1.408d54p-23f, 0x1.318bep-30f, 0x1.662968p-36f, 0x1.a3d666p-42f, -0x1.10860ap-30f, -0x1.10860ap-30f,
    -0x1.10860ap-30f, -0x1.10860ap-30f, 0x1.f6350cp-1f, 0x1.f0f84ep-1f, 0x1.ebca7p-1f, 0x1.e4e70cp-1f, 0x1.d97538p-1f,
    0x1.c7e3c4p-1f, 0x1.b38334p-1f, 0x1.9e6f54p-1f, 0x1.7a8184p-1f, 0x1.4a1d6ap-1f, 0x1.18d514p-1f, 0x1.d87d1cp-2f,
    0x1.61aeb6p-2f, 0x1.cd9b68p-3f, 0x1.26c404p-3f, 0x1.6f047ap-4f}, {-0x1.5b48bap-5f, -0x1.06d262p-6f, -0x1.870f5ap-8f,
    -0x1.207ddp-9f, -0x1.022d3cp-11f, -0x1.183ccep-14f, -0x1.2fba7ep-17f, -0x1.46eb08p-20f, -0x1.4021cp-23f,
    -0x1.2ce33cp-30f, -0x1.60b364p-36f, -0x1.9d6fa6p-42f, 0x1.a673bcp-22f, 0x1.a673bcp-22f, 0x1.a673bcp-22f,
    0x1.a673bcp-22f, -0x1.15d182p-3f, -0x1.5497bap-3f, -0x1.86d2bcp-3f, -0x1.be36f2p-3f, -0x1.03cd92p-2f,
    -0x1.2dd6eap-2f, -0x1.50a8d4p-2f, -0x1.69d334p-2f, -0x1.828b2ap-2f, -0x1.89833ap-2f, -0x1.79674p-2f,
    -0x1.5ac078p-2f, -0x1.1e2878p-2f, -0x1.96451ap-3f, -0x1.10bae2p-3f, -0x1.5e3052p-4f}, {0x1.baa58ep-6f,
    0x1.58bb4p-7f, 0x1.0325bap-8f, 0x1.7fcf7ap-10f, 0x1.583aacp-12f, 0x1.75d3eep-15f, 0x1.953346p-18f, 0x1.b40f3ep-21f,
    0x1.ab1994p-24f, 0x1.9490dcp-31f, 0x1.da3b84p-37f, 0x1.15f2a8p-42f, -0x1.555ba8p-2f, -0x1.555ba8p-2f,
    -0x1.555ba8p-2f, -0x1.555ba8p-2f, -0x1.3b9802p-2f, -0x1.2e22bep-2f, -0x1.21098cp-2f, -0x1.0ff11p-2f,
    -0x1.e8b6dap-3f, -0x1.98022ap-3f, -0x1.407098p-3f, -0x1.d95f22p-4f, -0x1.b7b1d4p-5f, 0x1.ceebcap-7f, 0x1.097aa6p-4f,
    0x1.83ea94p-4f, 0x1.c6836ap-4f, 0x1.9764dap-4f, 0x1.342bb2p-4f, 0x1.a795dap-5f}, {-0x1.94b554p-7f, -0x1.503a64p-8f,
    -0x1.028556p-9f, -0x1.82067p-11f, -0x1.6688dp-13f, -0x1.85bf9p-16f, -0x1.a67ff6p-19f, -0x1.c6cd28p-22f,
    -0x1.c17178p-25f, -0x1.e06b3p-32f, -0x1.1992d8p-37f, -0x1.4a0f94p-43f, 0x1.ffd3cap-12f, 0x1.ffd3cap-12f,
    0x1.ffd3cap-12f, 0x1.ffd3cap-12f, 0x1.67bdc2p-4f, 0x1.b20f46p-4f, 0x1.ea2cd2p-4f, 0x1.11d186p-3f, 0x1.331c2cp-3f,
    0x1.501da8p-3f, 0x1.5c214ap-3f, 0x1.58657cp-3f, 0x1.397436p-3f, 0x1.e9f626p-4f, 0x1.44f778p-4f, 0x1.63faa2p-5f,
    0x1.e927fep-9f, -0x1.5b5292p-6f, -0x1.9bef2cp-6f, -0x1.5533d6p-6f}, {0x1.04c73cp-8f, 0x1.f4e9e4p-10f,
    0x1.92d47cp-11f, 0x1.31dbaap-12f, 0x1.1b1e42p-14f, 0x1.33c86p-17f, 0x1.4d744ep-20f, 0x1.68b306p-23f,
    0x1.6392e6p-26f, 0x1.701c64p-33f, 0x1.af7ffcp-39f, 0x1.f9cdfcp-45f, 0x1.0a1f72p-3f, 0x1.0a1f72p-3f, 0x1.0a1f72p-3f,
    0x1.0a1f72p-3f, 0x1.cada9ep-4f, 0x1.a21f0ep-4f, 0x1.751c8p-4f, 0x1.42964ap-4f, 0x1.e39e7ap-5f, 0x1.0598bp-5f,
    0x1.7db032p-8f, -0x1.18955p-6f, -0x1.64fbdep-5f, -0x1.f8bd44p-5f, -0x1.00c4b4p-4f, -0x1.b2d302p-5f, -0x1.0664c4p-5f,
    -0x1.36133ep-7f, 0x1.72dc18p-10f, 0x1.2e301cp-8f}};

NPU_INLINE vf tanh(vf x) {
  const vf a = at_most(9.1f, abs(x));  // tanh(9.1) is 1
  const vi32 bits = (vi32)_mm512_max_epi32((__m512i)a, _mm512_set1_epi32(0x3d800000));  // 1/16
  return copysign(by_centre(a, bits >> 21, TANH_TABLE), x);
}

// ---------------------------------------------------------------------------------------------- logarithms
// x = 2^n m with m in [0.75, 1.5), and c is nearly 1/m: log(x) = n log(2) - log(c) + log(1 + r), r = m c - 1.
alignas(64) constexpr float LOG_INVERSE[1][32] = {{0x1p+0f, 0x1.e8p-1f, 0x1.dcp-1f, 0x1.ccp-1f, 0x1.cp-1f, 0x1.b4p-1f,
    0x1.a8p-1f, 0x1.ap-1f, 0x1.94p-1f, 0x1.8cp-1f, 0x1.8p-1f, 0x1.78p-1f, 0x1.7p-1f, 0x1.68p-1f, 0x1.6p-1f, 0x1.58p-1f,
    0x1.5p+0f, 0x1.4cp+0f, 0x1.44p+0f, 0x1.4p+0f, 0x1.38p+0f, 0x1.34p+0f, 0x1.2cp+0f, 0x1.28p+0f, 0x1.2p+0f, 0x1.1cp+0f,
    0x1.18p+0f, 0x1.14p+0f, 0x1.1p+0f, 0x1.0cp+0f, 0x1.08p+0f, 0x1p+0f}};
alignas(64) constexpr float LOG_TABLE[2][32] = {{0x0p+0f, 0x1.894p-5f, 0x1.2aap-4f, 0x1.b6ap-4f, 0x1.118p-3f,
    0x1.491p-3f, 0x1.824p-3f, 0x1.a94p-3f, 0x1.e53p-3f, 0x1.071p-2f, 0x1.2698p-2f, 0x1.3c28p-2f, 0x1.5228p-2f,
    0x1.68bp-2f, 0x1.7fbp-2f, 0x1.9738p-2f, -0x1.1678p-2f, -0x1.0a3p-2f, -0x1.e27p-3f, -0x1.c9p-3f, -0x1.952p-3f,
    -0x1.7acp-3f, -0x1.44dp-3f, -0x1.295p-3f, -0x1.e28p-4f, -0x1.a92p-4f, -0x1.6fp-4f, -0x1.342p-4f, -0x1.f0cp-5f,
    -0x1.774p-5f, -0x1.f8p-6f, 0x0p+0f}, {0x0p+0f, 0x1.54294p-18f, 0x1.2911c6p-22f, 0x1.911b5ap-17f, -0x1.c5f76p-17f,
    0x1.ec199ep-18f, -0x1.f4d572p-18f, -0x1.2c3752p-19f, 0x1.dffce2p-20f, 0x1.c3026ap-17f, -0x1.deecb2p-18f,
    -0x1.6c4666p-17f, 0x1.7039c6p-17f, -0x1.be0b1cp-17f, -0x1.7109fap-20f, 0x1.1a189ap-17f, 0x1.1aa2a2p-17f,
    -0x1.27139cp-17f, -0x1.db8abcp-21f, 0x1.070cacp-20f, -0x1.6a73d2p-17f, 0x1.dbf7bcp-17f, -0x1.5b665cp-18f,
    -0x1.4be08p-17f, 0x1.f123aap-17f, -0x1.b4e92cp-18f, -0x1.a515cap-17f, 0x1.434f22p-19f, 0x1.cf3feep-17f,
    -0x1.63d8ccp-19f, -0x1.4d873cp-17f, 0x0p+0f}};
alignas(64) constexpr float LOG2_TABLE[2][32] = {{0x0p+0f, 0x1.1bcp-4f, 0x1.aeep-4f, 0x1.3c7p-3f, 0x1.8a9p-3f,
    0x1.dacp-3f, 0x1.16ap-2f, 0x1.32cp-2f, 0x1.5ep-2f, 0x1.7b88p-2f, 0x1.a9p-2f, 0x1.c818p-2f, 0x1.e7ep-2f,
    0x1.042cp-1f, 0x1.14c4p-1f, 0x1.25cp-1f, -0x1.91b8p-2f, -0x1.8008p-2f, -0x1.5cp-2f, -0x1.49a8p-2f, -0x1.244p-2f,
    -0x1.113p-2f, -0x1.d4ap-3f, -0x1.acfp-3f, -0x1.5cp-3f, -0x1.32bp-3f, -0x1.08cp-3f, -0x1.bc8p-4f, -0x1.664p-4f,
    -0x1.0ecp-4f, -0x1.6bcp-5f, 0x0p+0f}, {0x0p+0f, -0x1.9ab4p-17f, -0x1.8dca94p-17f, -0x1.26bcc8p-21f,
    -0x1.9fd502p-17f, 0x1.169f22p-18f, -0x1.fd64ep-17f, -0x1.1c8f12p-22f, -0x1.18708ap-17f, 0x1.f02cf2p-18f,
    -0x1.a39fbep-20f, 0x1.dc2d46p-18f, -0x1.40358ep-19f, -0x1.5a32c2p-20f, 0x1.60fe68p-17f, 0x1.408c78p-18f,
    -0x1.d448f8p-17f, -0x1.2b18bp-17f, -0x1.a39fbep-18f, 0x1.ed0cbap-20f, -0x1.eac382p-20f, -0x1.f6b4c2p-20f,
    0x1.1b3cdap-19f, -0x1.78b6d4p-17f, -0x1.a39fbep-19f, 0x1.61d876p-19f, -0x1.62336ap-17f, -0x1.0902b6p-18f,
    0x1.20a6dep-21f, 0x1.8ec0bap-17f, 0x1.2c8a72p-17f, 0x0p+0f}};
alignas(64) constexpr float LOG10_TABLE[2][32] = {{0x0p+0f, 0x1.558p-6f, 0x1.038p-5f, 0x1.7dp-5f, 0x1.dbp-5f,
    0x1.1dep-4f, 0x1.4f8p-4f, 0x1.716p-4f, 0x1.a56p-4f, 0x1.c9p-4f, 0x1.ffcp-4f, 0x1.12ap-3f, 0x1.25cp-3f, 0x1.394p-3f,
    0x1.4d4p-3f, 0x1.61bp-3f, -0x1.e3cp-4f, -0x1.ce6p-4f, -0x1.a3p-4f, -0x1.8dp-4f, -0x1.5fep-4f, -0x1.49p-4f,
    -0x1.1a2p-4f, -0x1.024p-4f, -0x1.a3p-5f, -0x1.714p-5f, -0x1.3ecp-5f, -0x1.0bcp-5f, -0x1.af8p-6f, -0x1.46p-6f,
    -0x1.b6p-7f, 0x0p+0f}, {0x0p+0f, 0x1.bd2406p-18f, -0x1.ddbe1ap-17f, 0x1.c0517ep-19f, 0x1.1ed766p-17f,
    -0x1.573e6ep-17f, -0x1.54991p-18f, -0x1.798e4cp-19f, 0x1.d064bep-17f, 0x1.50cf32p-19f, -0x1.ea21c4p-23f,
    -0x1.96c13p-17f, -0x1.5f7a94p-17f, 0x1.c03de6p-17f, 0x1.fc13aep-18f, 0x1.a4e66p-17f, 0x1.f2a79p-19f,
    -0x1.c83c8cp-17f, -0x1.53ac14p-17f, 0x1.cf8ef4p-17f, -0x1.009116p-17f, 0x1.825c42p-17f, -0x1.a22a8p-19f,
    -0x1.460f84p-19f, -0x1.53ac14p-18f, -0x1.0684fap-18f, -0x1.1199a6p-17f, 0x1.fe57e8p-17f, 0x1.036a8p-17f,
    0x1.614a68p-19f, 0x1.6f714ep-19f, 0x0p+0f}};
constexpr float LOG_NEAR[] = {-0x1.fffffcp-2f, 0x1.555554p-2f, -0x1.0039ap-2f, 0x1.99a1e6p-3f};
constexpr float LOG2_NEAR[] = {-0x1.715474p-1f, 0x1.ec709cp-2f, -0x1.71a2c4p-2f, 0x1.274cd8p-2f};
constexpr float LOG10_NEAR[] = {-0x1.bcb7aep-3f, 0x1.287a74p-3f, -0x1.bd1a7p-4f, 0x1.6425c2p-4f};

// The logarithm of a base for which log(2) is hi + lo and log(e) is scale + scale_rest. Heads are multiples of 2^-15, and
// their sum has no error.
template <int N>
NPU_INLINE vf log_by_table(vf x, const float (&table)[2][32], const float (&near)[N], float hi, float lo, float scale,
                           float scale_rest) {
  const __m512 v = (__m512)x, mantissa = _mm512_getmant_ps(v, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const vf m = (vf)mantissa, n = (vf)_mm512_sub_ps(_mm512_getexp_ps(v), _mm512_getexp_ps(mantissa));
  const vi32 interval = (vi32)m >> 18;
  const vf r = fused(m, look_up(LOG_INVERSE[0], interval), splat<vf>(-1)), factor = splat<vf>(scale);
  const vf head = fused(n, splat<vf>(hi), look_up(table[0], interval));
  vf rest = fused(n, splat<vf>(lo), look_up(table[1], interval)), part = r;
  if (scale != 1) {
    part = r * factor;
    rest += fused(r, splat<vf>(scale_rest), fused(r, factor, -part));
  }
  const vf y = head + (part + fma(r * r, polynomial(near, r), rest));
  // Special cases, 4 bits each: 2: NaN as it is; 4, 5: minus, plus infinity; 3: NaN; 0: y.
  constexpr int ZERO = 4 << 8, NANS = 0x22, MINUS_INFINITY = 3 << 16, INFINITE = 5 << 20, NEGATIVE = 3 << 24;
  const __m512i cases = _mm512_set1_epi32(ZERO | NANS | MINUS_INFINITY | INFINITE | NEGATIVE);
  return (vf)_mm512_fixupimm_ps((__m512)y, v, cases, 0);
}
NPU_INLINE vf log(vf x) { return log_by_table(x, LOG_TABLE, LOG_NEAR, LN2_HI, LN2_LO, 1.f, 0.f); }
NPU_INLINE vf log2(vf x) { return log_by_table(x, LOG2_TABLE, LOG2_NEAR, 1.f, 0.f, LOG2_E, 0x1.4ae0cp-26f); }
NPU_INLINE vf log10(vf x) {
  return log_by_table(x, LOG10_TABLE, LOG10_NEAR, 0x1.344p-2f, 0x1.3509f8p-18f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f);
}

// ---------------------------------------------------------------------------------------------- trigonometry
constexpr float SIN_NEAR[] = {-0x1.555546p-3f, 0x1.110778p-7f, -0x1.9954p-13f};
constexpr float COS_NEAR[] = {0x1.55554ap-5f, -0x1.6c0c28p-10f, 0x1.99e80cp-16f};
constexpr float TAN_TAIL[] = {0x1.55556p-2f, 0x1.110d9ep-3f, 0x1.bad9c2p-5f, 0x1.5cc0d6p-6f, 0x1.62cb18p-7f,
    0x1.9c2654p-14f, 0x1.1e9182p-8f};
// pi/2 in three parts.
constexpr float QUARTER[3] = {0x1.921fb6p+0f, -0x1.777a5cp-25f, -0x1.ee59dap-50f};
constexpr float NEAR_TURNS = 0x1p13f;  // the largest argument

// x = n pi/2 + head + tail with |head| <= pi/4.
struct QuarterTurns { vf head, tail; vi32 n; };
NPU_INLINE QuarterTurns quarter_turns(vf x) {
  vf n;
  const vi32 quarter = nearest_int(x * 0x1.45f306p-1f, &n);
  // Exact for up to 13 bits of n, which is also why `lost` has no error (T. J. Dekker's fast two-sum, 1971).
  const vf exact = fused(-n, splat<vf>(QUARTER[0]), x), second = splat<vf>(QUARTER[1]);
  const vf part = n * second, part_rest = fused(n, second, -part), head = exact - part, lost = (exact - head) - part;
  return {head, fused(-n, splat<vf>(QUARTER[2]), lost - part_rest), quarter};
}

// sin(x + shift pi/2)
NPU_INLINE vf sine(const QuarterTurns& t, int shift) {
  const vi32 n = t.n + shift;
  const vf z = t.head * t.head, half = 0.5f * z, one = splat<vf>(1), c = one - half;
  const vf sine = t.head + fma(t.head * z, polynomial(SIN_NEAR, z), t.tail * c);
  const vf cosine = c + (((one - c) - half) + fma(z * z, polynomial(COS_NEAR, z), -(t.head * t.tail)));
  return (vf)((vi32)select((n & 1) != 0, cosine, sine) ^ (n & 2) << 30);
}
// Returns far(x) in the lanes of arguments beyond NEAR_TURNS, `near` in the others.
template <class F> static NPU_NOINLINE vf call_far(F far, vf x) { return far(x); }
template <class F> NPU_INLINE vf near_or_far(vf x, vf near, F far) {
  const vi32 beyond = abs(x) > NEAR_TURNS;
  return __builtin_expect(any(beyond), 0) ? select(beyond, call_far(far, x), near) : near;
}
NPU_INLINE vf sin(vf x) {
  const vf near = select(x == vf{}, x, sine(quarter_turns(x), 0));
  return near_or_far(x, near, [](vf v) NPU_HALF { return sin_through_double(v); });
}
NPU_INLINE vf cos(vf x) {
  return near_or_far(x, sine(quarter_turns(x), 1), [](vf v) NPU_HALF { return cos_through_double(v); });
}
NPU_INLINE vf tan(vf x) {
  const QuarterTurns t = quarter_turns(x);
  const vf z = t.head * t.head, cube = t.head * z, tail = polynomial(TAN_TAIL, z), one = splat<vf>(1);
  const vf y = fused(cube, tail, t.head), rest = fused(cube, tail, t.tail * fused(y, y, one));
  const vf head = t.head + rest, lost = (t.head - head) + rest;
  const vf q = near_reciprocal(head), inverse = fused(q, fused(-lost, q, fused(-head, q, one)), q);  // -1/tan of odd n
  const vf near = select(x == vf{}, x, select((t.n & 1) != 0, -inverse, head));
  return near_or_far(x, near, [](vf v) NPU_HALF { return tan_through_double(v); });
}

// atan(u) = atan(centre) + (u - centre) P(u - centre) or, in the first interval, u + u P(u^2), where u is |x| or, if that
// is above 1, its reciprocal.
alignas(64) constexpr float ATAN_TABLE[5][16] = {{0x0p+0f, 0x1.8202p-4f, 0x1.4094p-3f, 0x1.bf25cp-3f, 0x1.20ec2p-2f,
    0x1.60cdcp-2f, 0x1.9fa64p-2f, 0x1.e06ep-2f, 0x1.106dp-1f, 0x1.3013ap-1f, 0x1.4fa94p-1f, 0x1.6fb5ep-1f,
    0x1.90799p-1f, 0x1.b00fap-1f, 0x1.d059bp-1f, 0x1.f05a2p-1f}, {0x0p+0f, 0x1.fb7e2ap-1f, 0x1.f3c13cp-1f,
    0x1.e8b424p-1f, 0x1.da3eeap-1f, 0x1.c9ac1ep-1f, 0x1.b7933ep-1f, 0x1.a3a17ep-1f, 0x1.8f07bcp-1f, 0x1.7a7f5ep-1f,
    0x1.6617d4p-1f, 0x1.51c724p-1f, 0x1.3da83p-1f, 0x1.2b0b98p-1f, 0x1.18ed9ep-1f, 0x1.07f188p-1f}, {-0x1.555556p-2f,
    -0x1.7b3daep-4f, -0x1.316d5cp-3f, -0x1.9761ep-3f, -0x1.efc476p-3f, -0x1.19e7a4p-2f, -0x1.326006p-2f,
    -0x1.42b81ap-2f, -0x1.4af0cap-2f, -0x1.4c5a4ep-2f, -0x1.48627ap-2f, -0x1.401474p-2f, -0x1.344e64p-2f,
    -0x1.26c99cp-2f, -0x1.1797dcp-2f, -0x1.07d102p-2f}, {0x1.99991ap-3f, -0x1.435e1cp-2f, -0x1.25f4fp-2f,
    -0x1.fc96fap-3f, -0x1.9ce176p-3f, -0x1.39fc1ep-3f, -0x1.b52528p-4f, -0x1.ff2a48p-5f, -0x1.86d412p-6f,
    0x1.fbd09ep-8f, 0x1.0db71p-5f, 0x1.ac9b3ep-5f, 0x1.10285ep-4f, 0x1.34f0dep-4f, 0x1.4ad71ep-4f, 0x1.5435f8p-4f},
    {-0x1.233e1cp-3f, 0x1.6f8e3cp-4f, 0x1.1b504ap-3f, 0x1.617aa6p-3f, 0x1.86fcc8p-3f, 0x1.8ce4fp-3f, 0x1.78f1cep-3f,
    0x1.524398p-3f, 0x1.20b6dep-3f, 0x1.d671dep-4f, 0x1.6d8b88p-4f, 0x1.0d3b16p-4f, 0x1.72879p-5f, 0x1.cfebc2p-6f,
    0x1.e2121ap-7f, 0x1.14650ep-8f}};
alignas(64) constexpr float ATAN_BASE[2][32] = {{0x0p+0f, 0x1.80df02p-4f, 0x1.3dff66p-3f, 0x1.b83d28p-3f,
    0x1.199a1ep-2f, 0x1.53c2dp-2f, 0x1.8ad7c8p-2f, 0x1.c13578p-2f, 0x1.f4b7c6p-2f, 0x1.12645cp-1f, 0x1.291c3ep-1f,
    0x1.3ee318p-1f, 0x1.53daccp-1f, 0x1.66df84p-1f, 0x1.7927f6p-1f, 0x1.8a2ddap-1f, 0x1.921fb6p+0f, 0x1.7a11c6p+0f,
    0x1.6a5fc8p+0f, 0x1.5b181p+0f, 0x1.4bb92ep+0f, 0x1.3d2f02p+0f, 0x1.2f69c4p+0f, 0x1.21d258p+0f, 0x1.14f1c4p+0f,
    0x1.08ed88p+0f, 0x1.fb232cp-1f, 0x1.e55c52p-1f, 0x1.d0649ep-1f, 0x1.bd5fe6p-1f, 0x1.ab1774p-1f, 0x1.9a119p-1f},
    {0x0p+0f, -0x1.65828ep-40f, -0x1.18515ep-41f, 0x1.807e4ap-41f, -0x1.421d18p-39f, 0x1.038352p-41f, -0x1.6751aep-37f,
    0x1.0db5c8p-40f, 0x1.1897d2p-38f, 0x1.253d64p-38f, -0x1.d5867cp-41f, -0x1.0f19d6p-36f, 0x1.1f2542p-37f,
    -0x1.183a56p-38f, -0x1.76148cp-37f, -0x1.1ca254p-40f, -0x1.777a5cp-25f, -0x1.b77792p-25f, 0x1.0886bcp-25f,
    0x1.110846p-26f, -0x1.ddd552p-27f, -0x1.777b6p-25f, -0x1.7763e8p-25f, -0x1.777c78p-25f, -0x1.de0c86p-27f,
    -0x1.778386p-25f, 0x1.110ef2p-26f, 0x1.114f0cp-26f, 0x1.10e762p-26f, 0x1.111ccap-26f, 0x1.113a08p-26f,
    0x1.110fb8p-26f}};

NPU_INLINE vf atan(vf x) {
  const vf magnitude = abs(x), a = at_most(0x1p60f, magnitude), one = splat<vf>(1);
  const vi32 inverted = a > one;
  const vf inverse = near_reciprocal(a), u = select(inverted, inverse, a);
  const vf u_rest = select(inverted, inverse * fused(-inverse, a, one), vf{});
  const vi32 interval = (vi32)_mm512_cvttps_epi32((__m512)(u * 0x1.fffffep3f)), at = interval | (inverted & 16);
  const vi32 first = interval == 0;
  const vf t = (u - look_up(ATAN_TABLE[0], interval)) + u_rest;
  const vf by = select(first, t * t, t), signed_t = (vf)((vi32)t ^ (inverted & INT32_MIN));
  vf p = look_up(ATAN_TABLE[4], interval);
  for (int i = 3; i >= 1; i--) p = fma(p, by, look_up(ATAN_TABLE[i], interval));
  const vf base = select(first & ~inverted, a, look_up(ATAN_BASE[0], at));
  const vf rest = look_up(ATAN_BASE[1], at) + select(first & inverted, signed_t, vf{});
  return copysign(base + fma(p, signed_t, rest), x);
}

}  // namespace npu
