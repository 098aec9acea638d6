// The C++ API of partial all-reduce, which pleach.hpp includes.
#ifndef PLEACH_PARTIAL_HPP
#define PLEACH_PARTIAL_HPP

#include "pleach.hpp"

namespace pleach {

// A configuration with this activation, as "quorum:3". The text must outlive the configuration.
inline pleachPartialConfig_t partial_config(const char *activation = nullptr) {
    pleachPartialConfig_t config = PLEACH_PARTIAL_CONFIG_INITIALIZER;
    config.activation = activation;
    return config;
}

// A round that has ended: the elements of its result, and whose they are. Only until the next call
// on its Partial that returns a round, or the end of the Partial.
template <typename T> class Round {
public:
    // The combined contributions, which are the same bits on all ranks.
    const T *data() const noexcept { return static_cast<const T *>(round_.result); }
    std::size_t size() const noexcept { return count_; }
    const T *begin() const noexcept { return data(); }
    const T *end() const noexcept { return data() + count_; }
    const T &operator[](std::size_t index) const noexcept { return data()[index]; }
    // The ranks whose contributions are in the result: the same on all ranks.
    std::vector<int> contributors() const { return listed(&pleachPartialContributors, round_.contributors); }
    std::uint64_t number() const noexcept { return round_.number; }
    std::uint64_t missed() const noexcept { return round_.missed; }
    // What became of this rank's contribution: pleachOwnCounted to pleachOwnAbstained.
    int own() const noexcept { return round_.own; }
    // With pleachLateCorrect, as many combined elements that came too late for the round before, or
    // nullptr; and whose they are.
    const T *correction() const noexcept { return static_cast<const T *>(round_.correction); }
    std::vector<int> corrected() const { return listed(&pleachPartialCorrected, round_.corrected); }

private:
    template <typename> friend class Partial;
    Round(pleachPartial_t partial, std::size_t count) noexcept : partial_(partial), count_(count) {}
    using List = pleachResult_t (*)(pleachPartial_t, int *, std::size_t, std::size_t *);
    std::vector<int> listed(List list, int ranks) const {
        std::vector<int> found(static_cast<std::size_t>(ranks));
        std::size_t count = 0;
        detail::check(list(partial_, found.data(), found.size(), &count));
        return found;
    }
    pleachPartial_t partial_;
    std::size_t count_;
    pleachRound_t round_ = PLEACH_ROUND_INITIALIZER;
};

// An all-reduce that does not wait for late ranks; its destructor destroys it. All ranks must hold
// theirs until all have finished. The communicator may end before.
template <typename T> class Partial {
public:
    Partial(const Communicator &comm, std::size_t count, const pleachPartialConfig_t &config = partial_config(),
            pleachRedOp_t op = pleachSum)
        : count_(count) {
        pleachPartial_t partial = nullptr;
        detail::check(pleachPartialInit(&partial, count, DataType<T>::value, op, &config, comm.get()));
        partial_ = Owned(partial);
    }
    pleachPartial_t get() const noexcept { return partial_.get(); }
    std::size_t size() const noexcept { return count_; }
    // The next contribution: `size()` elements of any value, for the caller to write. Each may have
    // another address.
    T *contribution() {
        void *data = nullptr;
        detail::check(pleachPartialContribution(get(), &data));
        return static_cast<T *>(data);
    }
#if __cplusplus >= 202002L
    std::span<T> contribution_span() { return {contribution(), count_}; }
#endif
    Round<T> contribute() { return next(&pleachPartialContribute); }
    // Hands the contribution over and returns at once; `wait` gives its round. Meanwhile
    // `contribution()` is other memory.
    void start_contribute() { detail::check(pleachPartialStartContribute(get())); }
    Round<T> wait() { return next(&pleachPartialWait); }
    Round<T> abstain() { return next(&pleachPartialAbstain); }
    Round<T> finish() { return next(&pleachPartialFinish); }
    // How the rounds went so far at this rank.
    pleachPartialReport_t report() const {
        pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
        detail::check(pleachPartialGetReport(get(), &report, nullptr, 0));
        return report;
    }
    // By rank: in how many of the rounds its contribution is.
    std::vector<std::uint64_t> counted() const {
        std::vector<std::uint64_t> found(static_cast<std::size_t>(report().ranks));
        pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
        detail::check(pleachPartialGetReport(get(), &report, found.data(), found.size()));
        return found;
    }

private:
    Round<T> next(pleachResult_t (*call)(pleachPartial_t, pleachRound_t *)) {
        Round<T> round(get(), count_);
        detail::check(call(get(), &round.round_));
        return round;
    }
    using Owned = detail::Owner<pleachPartial_t, &pleachPartialDestroy>;
    Owned partial_;
    std::size_t count_;
};

} // namespace pleach

#endif // PLEACH_PARTIAL_HPP
