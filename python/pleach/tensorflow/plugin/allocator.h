// The memory of CPU tensors: lendable, so that a tensor is sent without a copy.
//
// Tensors that are too small to be lent, and those beyond the limit of lendable memory, lie in
// ordinary memory. A header before each buffer says which of the two it is. Lendable memory is
// shared with a forked child: a child that writes a tensor of its parent writes it there, too.
#ifndef PLEACH_TENSORFLOW_ALLOCATOR_H_
#define PLEACH_TENSORFLOW_ALLOCATOR_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "exchange.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/allocator_registry.h"

namespace pleach {

class LendableAllocator : public tensorflow::Allocator {
 public:
  std::string Name() override { return "pleach"; }

  void* AllocateRaw(size_t alignment, size_t bytes) override {
    // Lendable memory is lent from multiples of 64 bytes on, and aligned to as many.
    const size_t before = std::max(alignment, kHeaderBytes);
    void* base = nullptr;
    bool is_lendable = false;
    if (bytes >= kLentBytesMin && before == kHeaderBytes && Exchange::Get()->is_own_process())
      is_lendable = pleachLendableAlloc(Exchange::Get()->endpoint(), bytes + before, &base) ==
                    pleachSuccess;
    if (!is_lendable && posix_memalign(&base, before, bytes + before) != 0) return nullptr;
    char* memory = static_cast<char*>(base) + before;
    *HeaderOf(memory) = {base, is_lendable};
    return memory;
  }

  void DeallocateRaw(void* memory) override {
    if (memory == nullptr) return;
    const Header header = *HeaderOf(memory);
    if (!header.is_lendable) {
      free(header.base);
    } else if (Exchange::Get()->is_own_process()) {
      // A forked child leaves its parent's lendable memory alone.
      pleachLendableFree(header.base);
    }
  }

 private:
  struct Header {
    void* base;
    bool is_lendable;
  };
  static constexpr size_t kHeaderBytes = 64;
  static_assert(sizeof(Header) <= kHeaderBytes);

  static Header* HeaderOf(void* memory) {
    return reinterpret_cast<Header*>(static_cast<char*>(memory) - kHeaderBytes);
  }
};

// Memory below TensorFlow's own pools, which a CPU device has where something must be told of each
// piece (GPUs).
class OrdinarySubAllocator : public tensorflow::SubAllocator {
 public:
  OrdinarySubAllocator() : SubAllocator({}, {}) {}
  void* Alloc(size_t alignment, size_t bytes, size_t* received) override {
    void* memory = nullptr;
    *received = bytes;
    return posix_memalign(&memory, std::max(alignment, sizeof memory), bytes) == 0 ? memory : nullptr;
  }
  void Free(void* memory, size_t) override { free(memory); }
  bool SupportsCoalescing() const override { return false; }
};

// Whether TensorFlow has made the allocator of CPU tensors: a factory that comes later ends the
// process. A private member of the registry alone says so; an explicit instantiation may name it.
using IsMade = bool tensorflow::AllocatorFactoryRegistry::*;
IsMade IsMadeMember();
template <IsMade member>
struct IsMadeAccess {
  friend IsMade IsMadeMember() { return member; }
};
template struct IsMadeAccess<&tensorflow::AllocatorFactoryRegistry::first_alloc_made_>;

inline bool HasMadeAllocator() {
  return tensorflow::AllocatorFactoryRegistry::singleton()->*IsMadeMember();
}

class LendableAllocatorFactory : public tensorflow::AllocatorFactory {
 public:
  tensorflow::Allocator* CreateAllocator() override { return new LendableAllocator; }
  tensorflow::SubAllocator* CreateSubAllocator(int) override { return new OrdinarySubAllocator; }
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_ALLOCATOR_H_
