// The sender's side: a worker that offers tensors and buffers to receivers that ask for it, and
// answers all others as TensorFlow's own worker does.
#ifndef PLEACH_TENSORFLOW_WORKER_H_
#define PLEACH_TENSORFLOW_WORKER_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "grpcpp/support/byte_buffer.h"
#include "receive.h"
#include "rendezvous.h"
#include "tensorflow/core/common_runtime/buf_rendezvous.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_tensor_coding.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_worker_service.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/protobuf/transport_options.pb.h"

namespace pleach {

// Requests of other tasks that wait here for their tensor. Relaxed: a number for people.
inline std::atomic<uint64_t>& WaitingRequests() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// Answers a call once: with its tensor, or earlier when the receiver has cancelled it.
class Answer {
 public:
  explicit Answer(tensorflow::StatusCallback done) : done_(std::move(done)) {
    WaitingRequests().fetch_add(1, std::memory_order_relaxed);
  }

  // Whether this is the answer; `prepare` writes it before.
  template <typename Prepare>
  bool Give(Prepare&& prepare) {
    tensorflow::StatusCallback done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done = std::move(done_);
      done_ = nullptr;
    }
    if (done == nullptr) return false;
    WaitingRequests().fetch_sub(1, std::memory_order_relaxed);
    done(prepare());
    return true;
  }

 private:
  std::mutex mutex_;
  tensorflow::StatusCallback done_;
};

// The status of a call that had none in earlier versions of TensorFlow.
template <typename Call>
absl::Status StatusOf(Call&& call) {
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    return absl::OkStatus();
  } else {
    return call();
  }
}

class Worker : public tensorflow::GrpcWorker {
 public:
  Worker(tensorflow::WorkerEnv* env, const tensorflow::ConfigProto& config)
      : GrpcWorker(env, config), keeps_answers_(config.rpc_options().cache_rpc_response()) {}

  void GrpcRecvTensorAsync(tensorflow::CallOptions* options,
                           const tensorflow::RecvTensorRequest* request,
                           ::grpc::ByteBuffer* response, tensorflow::StatusCallback done) override {
    Ask ask;
    const bool asks = Read(request->transport_options(), &ask);
    if (asks && request->rendezvous_key() == kIntroductionKey) {
      Introduce(response);
      return done(absl::OkStatus());
    }
    tensorflow::Rendezvous::ParsedKey key;
    tensorflow::Device* device = nullptr;
    const bool may_offer = asks && !keeps_answers_ &&
                           ask.incarnation == Exchange::Get()->incarnation() &&
                           tensorflow::Rendezvous::ParseKey(request->rendezvous_key(), &key).ok() &&
                           PrepareRecvTensor(key, &device).ok() && device->device_type() == "CPU";
    if (!may_offer)
      return GrpcWorker::GrpcRecvTensorAsync(options, request, response, std::move(done));
    const absl::Status unique =
        recent_request_ids_.TrackUnique(request->request_id(), "RecvTensor", *request);
    if (!unique.ok()) return done(unique);
    auto answer = AnswerOf("RecvTensor", options, std::move(done));
    const int64_t step = request->step_id();
    env_->rendezvous_mgr->RecvLocalAsync(
        step, key,
        [this, step, key, answer, response](const absl::Status& status,
                                            const tensorflow::Rendezvous::Args& sent,
                                            const tensorflow::Rendezvous::Args&,
                                            const tensorflow::Tensor& tensor, bool is_dead) {
          const bool is_taken = answer->Give(
              [&] { return status.ok() ? Encode(key, tensor, is_dead, response) : status; });
          if (!is_taken && status.ok()) {
            auto found = env_->rendezvous_mgr->Find(step);
            static_cast<Rendezvous*>(found.get())->PutBack(key, sent, tensor, is_dead);
          }
        });
  }

  void RecvBufAsync(tensorflow::CallOptions* options, const tensorflow::RecvBufRequest* request,
                    tensorflow::RecvBufResponse* response, tensorflow::StatusCallback done) override {
    Ask ask;
    tensorflow::Device* device = nullptr;
    const bool may_offer = Read(request->transport_options(), &ask) && !keeps_answers_ &&
                           ask.incarnation == Exchange::Get()->incarnation() &&
                           env_->device_mgr->LookupDevice(request->src_device(), &device).ok() &&
                           device->device_type() == "CPU";
    if (!may_offer) return GrpcWorker::RecvBufAsync(options, request, response, std::move(done));
    const absl::Status unique =
        recent_request_ids_.TrackUnique(request->request_id(), "RecvBuf", *request);
    if (!unique.ok()) return done(unique);
    auto answer = AnswerOf("RecvBuf", options, std::move(done));
    // The end of the executor ends what waits in its table.
    const tensorflow::CollectiveExecutor::Handle executor(
        env_->collective_executor_mgr->FindOrCreate(request->step_id()), true);
    const auto consumed = [request, response, answer](const absl::Status& status,
                                                      tensorflow::BufRendezvous::Hook* hook) {
      const bool is_taken = answer->Give(
          [&] { return status.ok() ? EncodeBuffer(*request, hook, response) : status; });
      if (!is_taken && status.ok()) tensorflow::BufRendezvous::DoneWithHook(hook);
    };
    executor.get()->remote_access()->buf_rendezvous()->ConsumeBuf(
        request->buf_rendezvous_key(), request->src_device(), request->src_incarnation(), consumed,
        nullptr);
  }

 private:
  // The answer to a call, which the receiver may cancel.
  std::shared_ptr<Answer> AnswerOf(const char* method, tensorflow::CallOptions* options,
                                   tensorflow::StatusCallback done) {
    auto answer = std::make_shared<Answer>([options, done = std::move(done)](const absl::Status& status) {
      options->ClearCancelCallback();
      done(status);
    });
    // Called under the lock of the options, which the answer takes: so by another thread.
    options->SetCancelCallback([answer, method, env = env_] {
      env->env->SchedClosure([answer, method] {
        answer->Give([method] {
          return absl::CancelledError(absl::StrCat("the receiver has cancelled ", method));
        });
      });
    });
    return answer;
  }

  static void Introduce(::grpc::ByteBuffer* response) {
    tensorflow::RecvTensorResponse answer;
    Write(Introduction{Exchange::Get()->incarnation(), Exchange::Get()->address()},
          answer.mutable_transport_options());
    tensorflow::grpc::EncodeRecvTensorResponseToByteBuffer(answer, response);
  }

  static absl::Status Encode(const tensorflow::Rendezvous::ParsedKey& key,
                             const tensorflow::Tensor& tensor, bool is_dead,
                             ::grpc::ByteBuffer* response) {
    if (!is_dead && tensorflow::DataTypeCanUseMemcpy(tensor.dtype()) &&
        tensor.TotalBytes() >= kLentBytesMin) {
      Offer offer;
      offer.type = tensor.dtype();
      offer.shape = tensor.shape();
      // This reference keeps the bytes as they are: an assignment of the variable writes a copy.
      auto kept = std::make_shared<tensorflow::Tensor>(tensor);
      offer.number = Exchange::Get()->Offer(tensor.tensor_data().data(), tensor.TotalBytes(),
                                            std::string(key.FullKey()), std::nullopt, [kept] {});
      if (offer.number != 0) {
        tensorflow::RecvTensorResponse answer;
        Write(offer, answer.mutable_transport_options());
        tensorflow::grpc::EncodeRecvTensorResponseToByteBuffer(answer, response);
        return absl::OkStatus();
      }
    }
    return StatusOf([&] {
      return tensorflow::grpc::EncodeTensorToByteBuffer(is_dead, tensor, false, response);
    });
  }

  // The producer may write the buffer again when DoneWithHook was called.
  static absl::Status EncodeBuffer(const tensorflow::RecvBufRequest& request,
                                   tensorflow::BufRendezvous::Hook* hook,
                                   tensorflow::RecvBufResponse* response) {
    const tensorflow::Tensor& tensor = *hook->prod_value;
    const absl::string_view bytes = tensor.tensor_data();
    response->set_num_bytes(static_cast<int64_t>(bytes.size()));
    Offer offer;
    offer.type = tensor.dtype();
    offer.shape = tensor.shape();
    if (bytes.size() >= kLentBytesMin)
      offer.number = Exchange::Get()->Offer(bytes.data(), bytes.size(), request.buf_rendezvous_key(),
                                            request.step_id(), [hook] { tensorflow::BufRendezvous::DoneWithHook(hook); });
    if (offer.number != 0) {
      Write(offer, response->mutable_transport_options());
      return absl::OkStatus();
    }
    tensorflow::RecvBufRespExtra extra;
    extra.add_tensor_content(std::string(bytes));
    tensorflow::BufRendezvous::DoneWithHook(hook);
    response->mutable_transport_options()->PackFrom(extra);
    return absl::OkStatus();
  }

  // Answers are kept for receivers that ask again; an offer is received once.
  const bool keeps_answers_;
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_WORKER_H_
