// Kernels that can be part of a program: a list of calls with fixed arguments, run by one call.
//
// Each argument is a word of 8 bytes: an integer, an address, or the 4 bytes of a float.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace tw {

template <class T>
T from_word(uint64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(uintptr_t(word));
    } else if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == 4, "floats only");
        const uint32_t bits = uint32_t(word);
        T value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return T(int64_t(word));
    }
}

template <class... A, size_t... I>
void call(void (*function)(A...), const uint64_t* words, std::index_sequence<I...>) {
    function(from_word<A>(words[I])...);
}

template <class... A>
void call(void (*function)(A...), const uint64_t* words) {
    call(function, words, std::make_index_sequence<sizeof...(A)>());
}

}  // namespace tw

// Exports `<function>_words`, which takes its arguments as words.
#define TW_RECORDABLE(function) \
    extern "C" void function##_words(const uint64_t* words) { tw::call(function, words); }
