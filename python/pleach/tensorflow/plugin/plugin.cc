// The plug-in of TensorFlow: the server protocol "grpc+pleach".
//
// A server of this protocol is TensorFlow's gRPC server with a rendezvous, a worker and collectives
// that move large CPU tensors by pleach's tensor exchange, and everything else as before. Clients
// connect to it as to any gRPC server.
//
// | file | what it is |
// | --- | --- |
// | exchange.h | this process's end of the exchange, offers and fetches |
// | allocator.h | the memory of CPU tensors |
// | messages.h | what two plug-ins say to each other |
// | links.h | which tasks there are links to |
// | receive.h | a tensor over lent memory |
// | rendezvous.h, worker.h | the receiver's and the sender's side of tensors |
// | collective.h | the receiver's side of collectives |
//
// It is one translation unit, compiled on the machine on which it runs for the TensorFlow that is
// installed there: the C++ ABI holds for one version of it, PLEACH_TENSORFLOW_VERSION.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "allocator.h"
#include "collective.h"
#include "exchange.h"
#include "receive.h"
#include "rendezvous.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "worker.h"

namespace pleach {

constexpr char kProtocol[] = "grpc+pleach";
constexpr char kBuiltFor[] = PLEACH_TENSORFLOW_VERSION;

class Server : public tensorflow::GrpcServer {
 public:
  Server(const tensorflow::ServerDef& definition, tensorflow::Env* env)
      : GrpcServer(definition, env) {}

  absl::Status Begin(const tensorflow::ServerDef& definition, tensorflow::DeviceMgr* devices) {
    const std::string task =
        absl::StrCat("/job:", definition.job_name(), "/replica:", definition.replica(),
                     "/task:", definition.task_index());
    tensorflow::GrpcServerOptions options;
    options.local_device_mgr = devices;
    options.rendezvous_mgr_func = [](const tensorflow::WorkerEnv* env) {
      return new RendezvousTable(env);
    };
    options.worker_func = [](tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config) {
      return std::unique_ptr<tensorflow::GrpcWorker>(new Worker(env, config));
    };
    options.collective_mgr_func = [task](const tensorflow::ConfigProto& config,
                                         const tensorflow::WorkerEnv* env,
                                         tensorflow::WorkerCacheInterface* workers) {
      return CollectiveExecutorTable::New(config, env->device_mgr, workers, task);
    };
    return Init(options);
  }
};

class ServerFactory : public tensorflow::ServerFactory {
 public:
  bool AcceptsOptions(const tensorflow::ServerDef& definition) override {
    return definition.protocol() == kProtocol;
  }
  absl::Status NewServer(const tensorflow::ServerDef& definition, const Options& options,
                         std::unique_ptr<tensorflow::ServerInterface>* server) override {
    auto made = std::make_unique<Server>(definition, tensorflow::Env::Default());
    if (absl::Status begun = made->Begin(definition, options.local_device_mgr); !begun.ok())
      return begun;
    *server = std::move(made);
    return absl::OkStatus();
  }
};

}  // namespace pleach

extern "C" {

// The version of TensorFlow that runs: a function of its C API.
const char* TF_Version();

// Opens the exchange and registers the protocol and the allocator, once. Returns 0, or 1 with the
// reason in `text`. `is_lendable` gets whether tensors of this process lie in lendable memory,
// which they do not where TensorFlow has made some before.
int pleach_tensorflow_start(char* text, size_t bytes, int* is_lendable) {
  static const absl::Status opened = [] {
    const std::string built_for = pleach::kBuiltFor, running = TF_Version();
    if (built_for != running)
      return absl::FailedPreconditionError(absl::StrCat("the plug-in was built for TensorFlow ",
                                                        built_for, ", and this is ", running));
    absl::Status status = pleach::Exchange::Open();
    if (!status.ok()) return status;
    if (!pleach::HasMadeAllocator())
      tensorflow::AllocatorFactoryRegistry::singleton()->Register(
          __FILE__, __LINE__, "pleach", 1000, new pleach::LendableAllocatorFactory);
    tensorflow::ServerFactory::Register("PLEACH_SERVER", new pleach::ServerFactory);
    return status;
  }();
  *is_lendable = opened.ok() && tensorflow::cpu_allocator_base()->Name() == "pleach";
  if (opened.ok()) return 0;
  const std::string message(opened.message());
  const size_t length = std::min(message.size(), bytes - 1);
  std::memcpy(text, message.data(), length);
  text[length] = 0;
  return 1;
}

// What was counted, in the order of `COUNTS` in `__init__.py`.
void pleach_tensorflow_counts(uint64_t counts[9]) {
  pleachEndpointCounts_t found = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
  if (pleach::Exchange::Get() != nullptr)
    pleachEndpointGetCounts(pleach::Exchange::Get()->endpoint(), &found);
  const pleach::ReceivedCounts* received = pleach::ReceivedCounts::Get();
  const uint64_t values[9] = {received->in_place, received->by_fabric, received->by_grpc,
                              found.sentInPlace,  found.links,         found.leases,
                              found.bytesLent,    found.bytesLendable, pleach::WaitingRequests()};
  std::memcpy(counts, values, sizeof values);
}
}
