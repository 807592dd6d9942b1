// Matrices: ldmatrix and stmatrix, mma.sync and wgmma.  Products are exact and are added up in double; the sum is rounded once, to float32.
#include <algorithm>
#include <utility>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

double ElementOf(uint64_t bits, Type type) {
  switch (type) {
    case Type::kTF32:
      return FloatOf(bits & 0xffffe000);  // the low bits are not read
    case Type::kF32:
      return FloatOf(bits);
    case Type::kS8:
    case Type::kU8:
    case Type::kS32:
      return static_cast<double>(IntegerIn(bits, type));
    case Type::kF16:
    case Type::kBF16:
    case Type::kE4M3:
    case Type::kE5M2:
      return Decode(static_cast<uint32_t>(bits & Ones(BitsOf(type))), FormatOf(type));
    default:
      throw Fault("no element of a matrix has this type");
  }
}

uint64_t SumAs(double sum, Type type, bool saturate) {
  if (type == Type::kF32) return BitsOfFloat(static_cast<float>(sum));
  if (type == Type::kF16) return Encode(sum, kF16Format);
  if (saturate) return static_cast<uint32_t>(static_cast<int32_t>(std::clamp(sum, -2147483648.0, 2147483647.0)));
  return static_cast<uint32_t>(static_cast<int64_t>(sum));
}

// Whether all lanes have come: none may have ended.
bool AllTogether(Warp& w, Mask mask, const char* what) {
  if (!w.Together(kAll)) return false;
  if (mask != kAll) throw Fault(what, " is not executed by all lanes of its warp");
  return true;
}

// The address of a row of a matrix, which a lane has.
uint64_t RowAt(Warp& w, const Operand& operand, int lane) {
  const uint64_t row = w.Address(operand, lane);
  w.lane = lane;
  if (row % 16) throw Fault("a row of a matrix at ", row, ", which is no multiple of 16");
  return row;
}

// ldmatrix: lane 8n + r has the address of row r of matrix n; then lane l holds columns 2 (l % 4) and the next of row l / 4.  flag: .trans
void LdMatrix(Warp& w, const Instruction& i, Mask mask) {
  if (!AllTogether(w, mask, "ldmatrix")) return;
  const auto& o = i.operands;
  const auto& to = o[0];
  w.Read(o[1]);
  for (int n = 0; n < i.count; ++n) {
    std::array<std::array<uint64_t, 8>, 8> matrix;
    for (int r = 0; r < 8; ++r) {
      const uint64_t row = RowAt(w, o[1], 8 * n + r);
      for (int c = 0; c < 8; ++c) matrix[r][c] = Load(w, 8 * n + r, Space::kShared, row + 2 * c, 2);
    }
    Row& d = w.Write(to.parts.empty() ? to : to.parts[n]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      d[l] = i.flag ? matrix[c][r] | matrix[c + 1][r] << 16 : matrix[r][c] | matrix[r][c + 1] << 16;
    }
  }
}
void StMatrix(Warp& w, const Instruction& i, Mask mask) {
  if (!AllTogether(w, mask, "stmatrix")) return;
  const auto& o = i.operands;
  w.Read(o[0]);
  for (int n = 0; n < i.count; ++n) {
    const Row& a = w.Read(o[1].parts.empty() ? o[1] : o[1].parts[n]);
    for (int r = 0; r < 8; ++r) {
      const uint64_t row = RowAt(w, o[0], 8 * n + r);
      for (int c = 0; c < 8; ++c) {
        const int lane = i.flag ? 4 * c + r / 2 : 4 * r + c / 2, half = i.flag ? r % 2 : c % 2;
        Store(w, 8 * n + r, Space::kShared, row + 2 * c, 2, a[lane] >> 16 * half & 0xffff);
      }
    }
  }
}

// An operand's registers for 16 x K (A) or K x 8 (B).  Of each lane, register n holds E neighbours along K: rows l / 4 (A's odd registers:
// 8 further down), from E (l % 4) on, in A's registers 2 and 3 and B's 1 further by half of K.
int PerRegister(Type type) { return type == Type::kTF32 || type == Type::kF32 ? 1 : 32 / BitsOf(type); }

std::vector<double> FragmentA(Warp& w, const Operand& registers, Type type, int k) {
  std::vector<double> a(16 * k);
  const int each = PerRegister(type), bits = 32 / each;
  for (size_t n = 0; n < registers.parts.size(); ++n) {
    const Row& row = w.Read(registers.parts[n]);
    for (int l = 0; l < kLanes; ++l) {
      for (int e = 0; e < each; ++e) a[(l / 4 + 8 * (n % 2)) * k + each * (l % 4 + 4 * (n / 2)) + e] = ElementOf(row[l] >> bits * e, type);
    }
  }
  return a;
}

// mma.sync.m16n8kK: type is that of the sum, from that of A; count is K
void Mma(Warp& w, const Instruction& i, Mask mask) {
  if (!AllTogether(w, mask, "mma.sync")) return;
  const auto& o = i.operands;
  const int k = i.count, each = PerRegister(i.from), bits = 32 / each;
  const auto of_b = static_cast<Type>(i.choice);
  const std::vector<double> a = FragmentA(w, o[1], i.from, k);
  std::vector<double> b(8 * k), sums(16 * 8);
  const std::vector<Operand> b_registers = o[2].parts.empty() ? std::vector<Operand>{o[2]} : o[2].parts;
  for (size_t n = 0; n < b_registers.size(); ++n) {
    const Row& row = w.Read(b_registers[n]);
    for (int l = 0; l < kLanes; ++l) {
      for (int e = 0; e < each; ++e) b[l / 4 * k + each * (l % 4 + 4 * n) + e] = ElementOf(row[l] >> bits * e, of_b);
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      double sum = 0;
      for (int at = 0; at < k; ++at) sum += a[m * k + at] * b[n * k + at];
      sums[m * 8 + n] = sum;
    }
  }
  std::array<Row, 4> results;
  const size_t registers = o[0].parts.size(), per = 4 / registers;  // two halves in each, of f16
  for (size_t n = 0; n < registers; ++n) {
    const Row& c = w.Read(o[3].parts[n]);
    for (int l = 0; l < kLanes; ++l) {
      results[n][l] = 0;
      for (size_t e = 0; e < per; ++e) {
        const int at = static_cast<int>(n * per + e);
        const double sum = ElementOf(c[l] >> 16 * e, i.type) + sums[(l / 4 + 8 * (at / 2)) * 8 + l % 4 * 2 + at % 2];
        results[n][l] |= SumAs(sum, i.type, i.flag) << 16 * e;
      }
    }
  }
  for (size_t n = 0; n < registers; ++n) w.Write(o[0].parts[n]) = results[n];
}

// A matrix in shared memory as wgmma's descriptors tell it, by 16-byte chunks: CUTLASS's canonical layouts (mma_traits_sm90_gmma.hpp).
struct SharedMatrix {
  int64_t start, leading, stride;
  int swizzle;      // bytes of a swizzled row: 16 (none), 32, 64 or 128
  bool transposed;  // rows (M or N) are contiguous, not K
  int bytes;        // of an element

  SharedMatrix(uint64_t bits, bool transposed, Type type) : transposed(transposed), bytes(type == Type::kTF32 ? 4 : BitsOf(type) / 8) {
    start = (bits & 0x3fff) << 4, leading = (bits >> 16 & 0x3fff) << 4, stride = (bits >> 32 & 0x3fff) << 4;
    constexpr int kSwizzles[] = {16, 128, 64, 32};
    swizzle = kSwizzles[bits >> 62];
    if (bits >> 49 & 7) throw Fault("a descriptor with a base offset");
  }
  // The chunk that holds the element (row, k) and those that follow along the contiguous axis.
  int64_t Chunk(int64_t row, int64_t k) const {
    const int64_t contiguous = (transposed ? row : k) * bytes / 16, other = transposed ? k : row, wide = swizzle / 16;
    int64_t at = start;
    if (!transposed) {  // 8 rows a brick
      at += other / 8 * stride + other % 8 * swizzle + (swizzle == 16 ? contiguous * leading : contiguous * 16);
    } else if (swizzle == 16) {
      at += contiguous * stride + other / 8 * leading + other % 8 * 16;
    } else {
      at += contiguous / wide * leading + contiguous % wide * 16 + other / 8 * stride + other % 8 * swizzle;
    }
    return at ^ (at >> 3 & (swizzle - 16));
  }
  int64_t Address(int64_t row, int64_t k) const { return Chunk(row, k) + (transposed ? row : k) * bytes % 16; }
};

// wgmma: type is that of the sum, from that of A, choice that of B; count is N; the shape's K is that of 32 bytes.
void WgmmaIssue(Warp& w, const Instruction& i, Mask mask) {
  if (!AllTogether(w, mask, "wgmma")) return;
  const auto& o = i.operands;
  const auto of_b = static_cast<Type>(i.choice);
  const int n = i.count, k = 256 / (i.from == Type::kTF32 ? 32 : BitsOf(i.from));
  const auto immediate = [&](size_t at) { return at < o.size() ? static_cast<int64_t>(w.Read(o[at])[0]) : 0; };
  const auto uniform = [&](const Operand& operand) {
    const Row& row = w.Read(operand);
    if (std::count(row.begin(), row.end(), row[0]) != kLanes) throw Fault("lanes have different descriptors");
    return row[0];
  };
  const bool in_registers = !o[1].parts.empty(), halves = BitsOf(i.from) == 16;
  const Mask scale = w.Predicate(o[3]);
  if (scale != 0 && scale != kAll) throw Fault("lanes disagree on scale-d");
  const bool integers = i.type == Type::kS32;
  const int64_t sign_a = integers ? 1 : immediate(4), sign_b = integers ? 1 : immediate(5);
  const bool trans_a = halves && !in_registers && immediate(6), trans_b = halves && immediate(in_registers ? 6 : 7);

  const auto check_fenced = [&](const Operand& of) {
    for (const Operand& part : of.parts) {
      if (w.touched[part.slot] == w.fences)
        throw Fault("takes ", w.kernel->slot_names[part.slot], ", which was written since the last wgmma.fence");
    }
  };
  if (w.fences == 1) throw Fault("no wgmma.fence precedes the first wgmma");
  if (scale) check_fenced(o[0]);  // Triton sets sums that are not read to zero behind the fence
  if (in_registers) check_fenced(o[1]);
  Asynchronous product;
  for (const Operand& d : o[0].parts) product.registers.push_back(d.slot);
  for (const Operand& a : o[1].parts) product.taken.push_back(a.slot);

  Cta& cta = *w.cta;
  const SharedMatrix b(uniform(o[2]), trans_b, of_b);
  const int of_row = 16 / b.bytes;  // elements of a chunk
  const auto note = [&](const SharedMatrix& matrix, int64_t first, int64_t rows) {
    const int64_t row_step = matrix.transposed ? of_row : 1, k_step = matrix.transposed ? 1 : of_row;
    for (int64_t row = first; row < first + rows; row += row_step) {
      for (int64_t at = 0; at < k; at += k_step) {
        const auto [block, address] = InShared(w, matrix.Chunk(row, at), 16);
        BeginAsyncRead(w, *block, address, 16);
        product.reads.emplace_back(address, 16);
      }
    }
  };
  note(b, 0, n);
  const int64_t first_row = w.index % 4 * 16;
  std::vector<double> a_values;
  std::vector<SharedMatrix> a;
  if (in_registers) {
    a_values = FragmentA(w, o[1], i.from, k);
  } else {
    a.emplace_back(uniform(o[1]), trans_a, i.from);
    note(a[0], first_row, 16);
  }

  product.act = [&w, &i, &cta, scale, sign_a, sign_b, k, n, of_b, first_row, a, b, a_values] {
    const auto element = [&](const SharedMatrix& matrix, int64_t row, int64_t at, Type type) {
      uint64_t bits = 0;
      std::memcpy(&bits, &cta.shared[matrix.Address(row, at)], matrix.bytes);
      return ElementOf(bits, type);
    };
    std::vector<double> left = a_values, right(n * k);
    if (!a.empty()) {
      left.resize(16 * k);
      for (int m = 0; m < 16; ++m) {
        for (int at = 0; at < k; ++at) left[m * k + at] = element(a[0], first_row + m, at, i.from);
      }
    }
    for (int c = 0; c < n; ++c) {
      for (int at = 0; at < k; ++at) right[c * k + at] = element(b, c, at, of_b);
    }
    const auto& d = i.operands[0].parts;
    const int per = i.type == Type::kF16 ? 2 : 1;
    for (size_t r = 0; r < d.size(); ++r) {
      Row& row = w.rows[d[r].slot];
      for (int l = 0; l < kLanes; ++l) {
        uint64_t bits = 0;
        for (int e = 0; e < per; ++e) {
          const int at = static_cast<int>(r) * per + e;  // of four: two columns of row l / 4, then two of the row 8 further down
          const int m = l / 4 + 8 * (at % 4 / 2), c = at / 4 * 8 + l % 4 * 2 + at % 2;
          double sum = 0;
          for (int x = 0; x < k; ++x) sum += left[m * k + x] * right[c * k + x];
          sum *= static_cast<double>(sign_a * sign_b);
          if (scale) sum += ElementOf(row[l] >> 16 * e, i.type);
          bits |= SumAs(sum, i.type, i.flag) << 16 * e;
        }
        row[l] = bits;
      }
    }
  };
  w.open_wgmma.push_back(std::move(product));
  if (!w.cta->cluster->launch->late) {
    // It reads and writes now; that it may yet do so stays noted until somebody waits.
    std::exchange(w.open_wgmma.back().act, nullptr)();
  }
  w.fenced = false;
  for (const int slot : w.open_wgmma.back().registers) ++w.in_flight[slot], ++w.flights;
  for (const int slot : w.open_wgmma.back().taken) ++w.taken[slot];
}

void WgmmaCommit(Warp& w, const Instruction&, Mask) {
  if (!w.Together(kAll)) return;
  w.wgmma_groups.push_back(std::exchange(w.open_wgmma, {}));
  ++w.committed;
}

// A product is the warp group's: whichever of its four warps has waited for it knows that all of them have read their operands, and may
// tell so to others.  So the reads have a clock of the group's, which counts committed groups.  Each warp keeps off its own registers until
// it has waited itself.
void WgmmaWait(Warp& w, const Instruction& i, Mask mask) {
  if (!w.Together(kAll)) return;
  const size_t most = w.Read(i.operands[0])[__builtin_ctz(mask)];
  if (w.committed <= most) return;
  const size_t ended = w.committed - most;  // so many of the first groups
  Cta& cta = *w.cta;
  const size_t groups = (cta.warps.size() + 3) / 4, first = w.index / 4 * 4;
  std::vector<Warp*> group;
  for (size_t n = first; n < std::min(first + 4, cta.warps.size()); ++n) group.push_back(cta.warps[n].get());
  const auto all_came = [group, ended] { return std::all_of(group.begin(), group.end(), [&](Warp* v) { return v->committed >= ended; }); };
  if (!all_came()) return ForLanes(mask, [&](int l) { w.Wait(l, "the other warps of a wgmma", all_came, true); });
  const size_t clock = cta.cluster->ctas.size() * cta.warps.size() + cta.rank * groups + w.index / 4;
  for (Warp* v : group) {
    const size_t before = v->committed - v->wgmma_groups.size();
    for (size_t n = before; n < ended; ++n) {
      for (Asynchronous& product : v->wgmma_groups[n - before]) {
        if (std::exchange(product.done, true)) continue;
        if (product.act) product.act();
        for (auto [address, bytes] : product.reads) EndAsyncRead(cta, address, bytes, clock, n + 1);
      }
    }
  }
  w.clocks.seen[clock] = std::max<uint32_t>(w.clocks.seen[clock], ended);
  for (; w.wgmma_groups.size() > most; w.wgmma_groups.pop_front()) {
    for (const Asynchronous& product : w.wgmma_groups.front()) {
      for (const int slot : product.registers) --w.in_flight[slot], --w.flights;
      for (const int slot : product.taken) --w.taken[slot];
    }
  }
}

void WgmmaFence(Warp& w, const Instruction&, Mask) {
  if (w.Together(kAll)) ++w.fences, w.fenced = true;
}

}  // namespace

bool DecodeTensor(Instruction& instruction) {
  Modifiers m(instruction);
  const std::string& name = instruction.name;
  Handler& handler = instruction.handler;
  if (name == "ldmatrix" || name == "stmatrix") {
    m.Ignore("sync", "aligned", "m8n8", "shared", "shared::cta", "b16");
    instruction.count = m.Take("x4") ? 4 : m.Take("x2") ? 2 : (m.Take("x1"), 1);
    instruction.flag = m.Take("trans");
    handler = name == "ldmatrix" ? LdMatrix : StMatrix;
    return m.empty();
  }
  const bool wgmma = name == "wgmma";
  if (wgmma && !m.Take("mma_async")) {
    m.Ignore("sync", "aligned");
    handler = m.Take("fence") ? WgmmaFence : m.Take("commit_group") ? WgmmaCommit : m.Take("wait_group") ? WgmmaWait : nullptr;
    return handler != nullptr && m.empty();
  }
  if (!wgmma && !(name == "mma" && m.Take("sync"))) return false;
  m.Ignore("sync", "aligned", "row", "col");
  instruction.flag = m.Take("satfinite");
  const std::string shape = m.TakeFirst();  // m64n256k16
  const size_t at_n = shape.find('n'), at_k = shape.find('k');
  if (at_n == std::string::npos || at_k == std::string::npos) return false;
  const int n = std::atoi(shape.c_str() + at_n + 1), k = std::atoi(shape.c_str() + at_k + 1);
  if (wgmma) {
    instruction.choice = static_cast<int>(m.TakeType()), instruction.from = m.TakeType(), instruction.type = m.TakeType();
    instruction.count = n;
    handler = WgmmaIssue;
    const int element = instruction.from == Type::kTF32 ? 32 : BitsOf(instruction.from);
    return m.empty() && shape.compare(0, 3, "m64") == 0 && element && k * element == 256;
  }
  m.TakeType();  // of what is added, which the sum has too
  instruction.choice = static_cast<int>(m.TakeType()), instruction.from = m.TakeType(), instruction.type = m.TakeType();
  instruction.count = k;
  handler = Mma;
  return m.empty() && shape.compare(0, 5, "m16n8") == 0;
}

}  // namespace ptx
