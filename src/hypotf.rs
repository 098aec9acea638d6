//! `hypotf` of the command itself, so that the command runs with glibc 2.34.
//!
//! rten calls `f32::asinh`, which calls the C function `hypotf`. A command that is built with a
//! newer glibc would ask for the version of 2.35, and a host with Red Hat Enterprise Linux 9 does
//! not have it.
#![allow(unsafe_code)]

/// The length of the hypotenuse, rounded once. The squares of all `f32` fit into an `f64`.
// SAFETY: it has the signature and the meaning of the function of that name in C, and nothing else
// in the command has that name.
#[unsafe(no_mangle)]
extern "C" fn hypotf(x: f32, y: f32) -> f32 {
    if x.is_infinite() || y.is_infinite() {
        return f32::INFINITY;
    }
    let [x, y] = [x, y].map(f64::from);
    (x * x + y * y).sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::hypotf;

    #[test]
    fn lengths_are_those_of_c_at_the_ends_of_the_range_too() {
        assert_eq!(hypotf(3.0, -4.0), 5.0);
        assert_eq!(hypotf(f32::MAX, 0.0), f32::MAX);
        assert_eq!(hypotf(f32::MAX, f32::MAX), f32::INFINITY);
        assert_eq!(hypotf(f32::from_bits(3), f32::from_bits(4)), f32::from_bits(5));
        assert_eq!(hypotf(f32::NAN, f32::NEG_INFINITY), f32::INFINITY);
        assert!(hypotf(f32::NAN, 1.0).is_nan());
        // By way of Rust's own function, which rten calls.
        assert!((1.0_f32.asinh() - 0.881_373_6).abs() < 1e-6);
    }
}
