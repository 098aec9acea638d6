//! When samples are left out, and when they come back.

use std::str::FromStr;

/// When samples are left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shrinking {
    /// Never.
    Never,
    /// From this iteration on, and again after as many iterations or as there are samples left.
    Every {
        /// The iterations.
        first: FirstCheck,
        /// When the samples come back.
        reconstruction: Reconstruction,
    },
}

impl Default for Shrinking {
    fn default() -> Self {
        Self::Every { first: FirstCheck::Share(0.05), reconstruction: Reconstruction::Single }
    }
}

/// After how many iterations samples are left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FirstCheck {
    /// So many.
    Iterations(u64),
    /// This share of the number of samples: above 0, at most 1.
    Share(f64),
}

/// When the samples that were left out come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconstruction {
    /// When the others have converged.
    Single,
    /// Also once when the others are ten times the tolerance from it.
    Multi,
}

/// A text that names no [`Shrinking`].
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
pub enum ShrinkingTextError {
    /// It does not say when samples are left out first.
    #[error("give none, a number of iterations above 0, or a share such as 5%")]
    First,
    /// It does not say when samples come back.
    #[error("after ':' give single or multi")]
    Reconstruction,
}

/// `none`, or `N` iterations or `P%` of the samples, then `:single` (which may be left out) or
/// `:multi`.
impl FromStr for Shrinking {
    type Err = ShrinkingTextError;

    fn from_str(text: &str) -> Result<Self, ShrinkingTextError> {
        if text == "none" {
            return Ok(Self::Never);
        }
        let (first, reconstruction) = match text.split_once(':') {
            None => (text, Reconstruction::Single),
            Some((first, "single")) => (first, Reconstruction::Single),
            Some((first, "multi")) => (first, Reconstruction::Multi),
            Some(_) => return Err(ShrinkingTextError::Reconstruction),
        };
        let first = match first.strip_suffix('%') {
            Some(share) => share.parse().ok().map(|share: f64| FirstCheck::Share(share / 100.0)),
            None => first.parse().ok().filter(|count| *count > 0).map(FirstCheck::Iterations),
        };
        Ok(Self::Every { first: first.ok_or(ShrinkingTextError::First)?, reconstruction })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shrinking_is_read_from_its_text() {
        let every = |first, reconstruction| Ok(Shrinking::Every { first, reconstruction });
        assert_eq!("none".parse(), Ok(Shrinking::Never));
        assert_eq!("5%:single".parse(), Ok(Shrinking::default()));
        assert_eq!("100%:multi".parse(), every(FirstCheck::Share(1.0), Reconstruction::Multi));
        assert_eq!("2".parse(), every(FirstCheck::Iterations(2), Reconstruction::Single));
        for text in ["", "sometimes", "0", "-1", "%", "5 %:single", "1.5"] {
            assert_eq!(text.parse::<Shrinking>(), Err(ShrinkingTextError::First), "{text}");
        }
        for text in ["5%:", "5%:double", "2:multi:single"] {
            assert_eq!(text.parse::<Shrinking>(), Err(ShrinkingTextError::Reconstruction), "{text}");
        }
    }
}
