// This process's end of the tensor exchange: one endpoint, opened when the plug-in is started and
// never closed. What others lend to this process is a Lent; what this process lends is an offer.
//
// An offer is a tensor under a key that nobody can guess: a random number as the step. The program
// that was told the number receives the tensor once. Invariant: what an offer keeps is released
// exactly once, when the receiver has given it back, its link has ended, or nobody came for it.
#ifndef PLEACH_TENSORFLOW_EXCHANGE_H_
#define PLEACH_TENSORFLOW_EXCHANGE_H_

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pleach.h"

namespace pleach {

// Smaller tensors are sent by gRPC, whose answer brings them at once: a fetch after it costs more
// than a copy of fewer bytes.
constexpr size_t kLentBytesMin = 512 << 10;
// How long an offer waits for the program that was told of it.
constexpr std::chrono::seconds kOfferWait{60};
// How long a receiver waits for a tensor that was offered to it, in milliseconds.
constexpr uint64_t kFetchWaitMs = 30'000;
// How long a fetch may make a broken link again, in milliseconds: its thread serves other calls.
constexpr uint64_t kRedialWaitMs = 3'000;
// How long a send may wait where the table is full; the tensor goes by gRPC then.
constexpr uint64_t kSendWaitMs = 1;
// Most bytes that may be held or lent: the memory is TensorFlow's, which has its own limits.
constexpr uint64_t kBytesMax = uint64_t{1} << 50;

// A tensor of another process that this one reads. Its end gives the memory back.
class Lent {
 public:
  Lent() = default;
  explicit Lent(pleachTensor_t tensor) : tensor_(tensor) {
    if (pleachTensorGetInfo(tensor_, &info_) != pleachSuccess) info_.data = nullptr, info_.bytes = 0;
  }
  Lent(Lent&& other) noexcept : tensor_(other.tensor_), info_(other.info_) { other.tensor_ = nullptr; }
  Lent& operator=(Lent&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    std::swap(info_, other.info_);
    return *this;
  }
  ~Lent() {
    if (tensor_ != nullptr) pleachTensorRelease(tensor_);
  }
  const void* data() const { return info_.data; }
  size_t bytes() const { return info_.bytes; }
  bool is_in_place() const { return info_.way == pleachTensorInPlace; }

 private:
  pleachTensor_t tensor_ = nullptr;
  pleachTensorInfo_t info_ = PLEACH_TENSOR_INFO_INITIALIZER;
};

// The last failure of this thread in gRPC's words.
inline absl::Status LastFailure(pleachResult_t result) {
  std::string text = pleachGetLastError(nullptr);
  pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
  if (pleachGetLastExchangeFailure(&failure) == pleachSuccess &&
      failure.result == static_cast<int>(result) && text.rfind(failure.text, 0) == 0) {
    switch (failure.kind) {
      case pleachExchangeTimeout: return absl::DeadlineExceededError(text);
      case pleachExchangeAborted: return absl::AbortedError(text);
      case pleachExchangeExhausted: return absl::ResourceExhaustedError(text);
      case pleachExchangeNotFound: return absl::NotFoundError(text);
      case pleachExchangeUnavailable: return absl::UnavailableError(text);
      case pleachExchangeCancelled: return absl::CancelledError(text);
    }
  }
  switch (result) {
    case pleachInvalidArgument: return absl::InvalidArgumentError(text);
    case pleachInvalidUsage: return absl::FailedPreconditionError(text);
    case pleachRemoteError: return absl::UnavailableError(text);
    case pleachTimeout: return absl::DeadlineExceededError(text);
    default: return absl::InternalError(text);
  }
}

// The name under which a tensor is offered: what fits, without a part of a character.
inline std::string KeyName(const std::string& name) {
  size_t bytes = std::min<size_t>(name.size(), PLEACH_KEY_NAME_BYTES - 1);
  while (bytes > 0 && bytes < name.size() && (name[bytes] & 0xC0) == 0x80) --bytes;
  return name.substr(0, bytes);
}

class Exchange {
 public:
  // The exchange of this process, or null before Open has succeeded.
  static Exchange* Get() { return Slot(); }

  // Opens the endpoint, with what the environment says. Once; a second call changes nothing.
  static absl::Status Open() {
    if (Slot() != nullptr) return absl::OkStatus();
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    options.bytesHeldMax = options.bytesLentMax = kBytesMax;
    options.bytesLendableMax = LendableBytes();
    pleachEndpoint_t endpoint = nullptr;
    if (pleachResult_t result = pleachEndpointOpen(&endpoint, &options); result != pleachSuccess)
      return LastFailure(result);
    auto* exchange = new Exchange(endpoint);
    char address[PLEACH_ADDRESS_BYTES];
    pleachEndpointAddress(endpoint, address, sizeof address);
    pleachEndpointIncarnation(endpoint, &exchange->incarnation_);
    exchange->address_ = address;
    Slot() = exchange;
    std::thread([exchange] { exchange->WithdrawOldOffers(); }).detach();
    return absl::OkStatus();
  }

  pleachEndpoint_t endpoint() const { return endpoint_; }
  const std::string& address() const { return address_; }
  uint64_t incarnation() const { return incarnation_; }
  // PLEACH_REQUIRE=regions: tensors that would go by gRPC are an error.
  bool requires_regions() const { return requires_regions_; }
  // Whether this process is the one that has opened the endpoint, and not a forked child.
  bool is_own_process() const { return getpid() == process_; }

  // Offers memory that stays until `release` is called, once. Returns the number of the offer, or 0
  // if it was refused; `release` is not called then. `name` is for people. `collective` is the step
  // whose Withdraw takes the offer back.
  uint64_t Offer(const void* data, size_t bytes, const std::string& name,
                 std::optional<int64_t> collective, std::function<void()> release) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number) return 0;
    number |= 1;
    auto kept = std::make_unique<Kept>(Kept{this, number, std::move(release)});
    {
      std::lock_guard<std::mutex> lock(mutex_);
      offers_[number] = {Clock::now() + kOfferWait, collective};
    }
    const std::string key = KeyName(name);
    const pleachResult_t result =
        pleachEndpointSendMemory(endpoint_, number, key.c_str(), const_cast<void*>(data), pleachUint8,
                                 1, &bytes, &Released, kept.get(), kSendWaitMs);
    if (result == pleachSuccess) {
      kept.release();
      return number;
    }
    Forget(number);
    return 0;
  }

  // Takes back what an aborted collective has offered and nobody has received.
  void Withdraw(int64_t collective) {
    std::unique_lock<std::mutex> lock(mutex_);
    Withdraw(&lock, [collective](const Waiting& offer) { return offer.collective == collective; });
  }

 private:
  using Clock = std::chrono::steady_clock;

  // An offer that waits for its receiver.
  struct Waiting {
    Clock::time_point until;
    std::optional<int64_t> collective;
  };

  struct Kept {
    Exchange* exchange;
    uint64_t number;
    std::function<void()> release;
  };

  explicit Exchange(pleachEndpoint_t endpoint) : endpoint_(endpoint), process_(getpid()) {
    const char* required = std::getenv("PLEACH_REQUIRE");
    requires_regions_ = required != nullptr && std::string(required) == "regions";
  }

  static Exchange*& Slot() {
    static Exchange* exchange = nullptr;
    return exchange;
  }

  // Half of the memory of the host: pages that were never used take none.
  static uint64_t LendableBytes() {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page <= 0) return 0;
    return static_cast<uint64_t>(pages) / 2 * static_cast<uint64_t>(page);
  }

  static void Released(void*, void* context) {
    std::unique_ptr<Kept> kept(static_cast<Kept*>(context));
    kept->exchange->Forget(kept->number);
    kept->release();
  }

  void Forget(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    offers_.erase(number);
  }

  // A receiver that was told of an offer may have ended before it came.
  void WithdrawOldOffers() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      never_notified_.wait_for(lock, kOfferWait / 4);
      Withdraw(&lock, [](const Waiting& offer) { return offer.until <= Clock::now(); });
    }
  }

  // An offer that was received is no longer in the endpoint's table, so its lease stays. One that
  // was not sent yet is withdrawn once more when it is old.
  template <typename Which>
  void Withdraw(std::unique_lock<std::mutex>* lock, Which which) {
    std::vector<uint64_t> withdrawn;
    for (auto& [number, offer] : offers_) {
      if (!which(offer)) continue;
      withdrawn.push_back(number);
      offer.collective.reset();
      if (offer.until <= Clock::now()) offer.until = Clock::time_point::max();
    }
    lock->unlock();
    for (uint64_t number : withdrawn) pleachEndpointCleanUp(endpoint_, number);
    lock->lock();
  }

  const pleachEndpoint_t endpoint_;
  const pid_t process_;
  std::string address_;
  uint64_t incarnation_ = 0;
  bool requires_regions_ = false;
  std::mutex mutex_;
  std::condition_variable never_notified_;
  std::map<uint64_t, Waiting> offers_;
};

// The receive of a tensor that was offered. Cancel may be called at any time.
class Fetch : public std::enable_shared_from_this<Fetch> {
 public:
  using Done = std::function<void(const absl::Status&, Lent)>;

  // `done` is called once after Start, in any thread, perhaps before Start returns.
  explicit Fetch(Done done) : done_(std::move(done)) {}

  void Start(pleachPeer_t peer, uint64_t number, const std::string& name) {
    // Where there is a link this waits for nothing. One without regions brings bytes all the same.
    if (pleachResult_t shared = pleachPeerShareRegions(peer, kRedialWaitMs);
        shared != pleachSuccess && shared != pleachInvalidUsage)
      return Finish(absl::UnavailableError(LastFailure(shared).message()), Lent());
    auto held = std::make_unique<std::shared_ptr<Fetch>>(shared_from_this());
    pleachReceive_t receive = nullptr;
    const std::string key = KeyName(name);
    const pleachResult_t result = pleachPeerStartReceive(peer, number, key.c_str(), kFetchWaitMs,
                                                         &Received, held.get(), &receive);
    if (result != pleachSuccess) return Finish(LastFailure(result), Lent());
    held.release();
    std::unique_lock<std::mutex> lock(mutex_);
    receive_ = receive;
    const bool is_cancelled = is_cancelled_;
    lock.unlock();
    if (is_cancelled) pleachReceiveCancel(receive);
  }

  void Cancel() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_cancelled_ = true;
    const pleachReceive_t receive = receive_;
    lock.unlock();
    // A receive that has ended has no handle any more, which is an error that says nothing here.
    if (receive != nullptr) pleachReceiveCancel(receive);
  }

 private:
  static void Received(void* context, pleachResult_t result, pleachTensor_t tensor) {
    std::unique_ptr<std::shared_ptr<Fetch>> held(static_cast<std::shared_ptr<Fetch>*>(context));
    if (result == pleachSuccess)
      (*held)->Finish(absl::OkStatus(), Lent(tensor));
    else
      (*held)->Finish(LastFailure(result), Lent());
  }

  void Finish(const absl::Status& status, Lent lent) {
    const Done done = std::move(done_);
    done(status, std::move(lent));
  }

  Done done_;
  std::mutex mutex_;
  pleachReceive_t receive_ = nullptr;
  bool is_cancelled_ = false;
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_EXCHANGE_H_
