// The sum of a vector over all ranks.
//
//   c++ -std=c++17 -O2 all_reduce.cpp -o all_reduce $(pkg-config --cflags --libs pleach)
//   pleach run -n 4 ./all_reduce
#include <iostream>
#include <vector>

#include <pleach.hpp>

int main() try {
    auto comm = pleach::Communicator::from_environment();
    std::vector<float> data(1 << 20, static_cast<float>(comm.rank()));
    comm.all_reduce(data.data(), data.size(), pleachSum);
    if (comm.rank() == 0) std::cout << "sum over " << comm.size() << " ranks: " << data[0] << "\n";
    const bool is_right = data.back() == static_cast<float>(comm.size() * (comm.size() - 1) / 2);
    comm.finalize();
    return is_right ? 0 : 1;
} catch (const pleach::CommunicatorError &error) {
    std::cerr << error.what() << "; because of rank " << error.failure().rank << "\n";
    return 1;
} catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return 1;
}
