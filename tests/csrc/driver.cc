// Runs calls of targets on a device that is simt.h: reads them from one file, and writes their replies to another.
//
//     driver REQUEST RESPONSE
//
// A request is a number of calls.  A call is a line of words, which `ReadCall` takes in their order, and the bytes of its operands; its
// reply is a line of JSON and the bytes of its results.  Every array is an allocation of its own, of exactly its size, for
// AddressSanitizer; results start as NaN; a call runs with three orders of threads, which must give the same bits.  A dry one has no arrays
// and runs no block.
#include <sys/mman.h>

#include <deque>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "common/family.h"
#include "simt_mma.h"

namespace {

using namespace jaxext;

struct Described {  // an array
  bool is_result;
  Dtype dtype;
  int64_t carried;  // the bytes at its end that the request or the reply has; before them there are zeros
  int64_t shift;    // bytes from a 16-byte boundary at which it starts
  std::vector<int64_t> shape;
  std::string contents;  // of an operand
};

struct Call {
  std::string target;
  bool dry;
  int64_t blocks;            // run only so many blocks, the last ones
  int64_t pending, refusal;  // the errors that CUDA remembers from before, and answers a launch with
  std::vector<Described> arrays;
  std::map<std::string, std::vector<int64_t>> attributes;
};

template <typename T = int64_t>
T Read(std::istream& in) {
  T value;
  if (!(in >> value)) simt::Fail("the request ends early");
  return value;
}

std::vector<int64_t> ReadNumbers(std::istream& in) {
  std::vector<int64_t> numbers(Read(in));
  for (int64_t& number : numbers) number = Read(in);
  return numbers;
}

Call ReadCall(std::istream& in) {
  Call call = {Read<std::string>(in), Read<bool>(in), Read(in), Read(in), Read(in), {}, {}};
  call.arrays.resize(Read(in));
  for (Described& array : call.arrays) array = {Read<bool>(in), static_cast<Dtype>(Read(in)), Read(in), Read(in), ReadNumbers(in), ""};
  for (int64_t left = Read(in); left > 0; --left) {
    const std::string name = Read<std::string>(in);
    call.attributes[name] = ReadNumbers(in);
  }
  in.ignore();  // the end of the line
  for (Described& array : call.arrays) {
    if (!array.is_result && !call.dry) array.contents.resize(array.carried), in.read(array.contents.data(), array.carried);
  }
  return call;
}

// What lies before its start is there to be found unchanged.  Where only its end is carried the rest is mapped, and takes no memory until
// it is touched.
class Memory {
 public:
  explicit Memory(const Described& array) : bytes_(Bytes(array.dtype)), carried_(array.carried), shift_(array.shift) {
    for (int64_t size : array.shape) bytes_ *= size;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const memory = mapped() ? mmap(nullptr, bytes_ + shift_, PROT_READ | PROT_WRITE, kFlags, -1, 0) : std::malloc(bytes_ + shift_);
    if (memory == MAP_FAILED) simt::Fail("no memory to map");
    memory_ = static_cast<char*>(memory);
    std::memset(memory_, 0xFF, shift_);
    std::memset(end(), 0xFF, carried_);
    std::copy(array.contents.begin(), array.contents.end(), end());
  }
  ~Memory() { mapped() ? static_cast<void>(munmap(memory_, bytes_ + shift_)) : std::free(memory_); }
  Memory(const Memory&) = delete;
  char* data() const { return memory_ + shift_; }
  std::string contents() const {
    if (std::any_of(memory_, data(), [](char c) { return c != '\xFF'; })) simt::Fail("written before the start of an array");
    return std::string(end(), carried_);
  }

 private:
  bool mapped() const { return carried_ < bytes_; }
  char* end() const { return data() + bytes_ - carried_; }  // where what is carried starts

  int64_t bytes_, carried_, shift_;
  char* memory_;
};

const Target& TargetOf(const std::string& name) {
  for (const Family& family : Families()) {
    for (const Target& target : family.targets) {
      if (target.name == name) return target;
    }
  }
  simt::Fail("there is no such target");
}

Status Run(const Call& call, simt::Order order, std::string* results) {
  auto* stream = reinterpret_cast<cudaStream_t>(&simt::runtime);  // any, but none that is CUDA's
  simt::machine = {simt_shared_memory, sizeof simt_shared_memory, order, call.dry ? 0 : call.blocks};
  simt::runtime = {stream, static_cast<cudaError_t>(call.pending), static_cast<cudaError_t>(call.refusal)};
  const Target& target = TargetOf(call.target);
  std::vector<int64_t> attributes;
  for (const Field& field : target.attributes) {
    const std::vector<int64_t>& numbers = call.attributes.at(field.name);
    attributes.insert(attributes.end(), numbers.begin(), numbers.end());
  }
  std::deque<Memory> memory;
  std::vector<Buffer> buffers[2];
  for (const Described& array : call.arrays) {
    void* const data = call.dry ? reinterpret_cast<void*>(int64_t{1 << 20} + array.shift) : memory.emplace_back(array).data();
    buffers[array.is_result].push_back({array.dtype, array.shape, data});
  }
  Arrays arrays(buffers[0], buffers[1]);
  const Status status = target.launch(attributes.data(), arrays, stream);
  for (size_t i = 0; i < memory.size(); ++i) {
    const std::string contents = memory[i].contents();
    if (call.arrays[i].is_result) {
      *results += contents;
    } else if (contents != call.arrays[i].contents) {
      simt::Fail("an operand was changed");
    }
  }
  return status;
}

}  // namespace

int main(int, char** arguments) {
  std::ifstream in(arguments[1], std::ios::binary);
  std::ofstream out(arguments[2], std::ios::binary);
  const int64_t calls = Read(in);
  for (int64_t i = 0; i < calls; ++i) {
    const Call call = ReadCall(in);
    std::cerr << "call " << i << std::endl;
    simt::launched = {};
    std::string results, others;
    const Status status = Run(call, simt::Order::kForward, &results);
    for (simt::Order order : {simt::Order::kBackward, simt::Order::kShuffled}) {
      others.clear();
      Run(call, order, &others);
      if (others != results) simt::Fail("another order of threads gives another result");
    }
    const auto& [kernel, grid, shared_bytes] = simt::launched;
    out << "{\"code\": " << status.code << ", \"message\": " << std::quoted(status.message) << ", \"kernel\": " << std::quoted(kernel)
        << ", \"grid\": [" << grid.x << ", " << grid.y << ", " << grid.z << "], \"shared_bytes\": " << shared_bytes
        << ", \"remembered\": " << cudaGetLastError() << "}\n"
        << results;
  }
  return 0;
}
