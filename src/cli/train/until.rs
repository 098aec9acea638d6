//! `--until` and `--sweep`: when a simulation ends, and by which values of a key.

use std::str::FromStr;
use std::time::Duration;

use pleach::partial::duration;
use pleach_training::{Scheme, SchemeTextError};

/// When a simulation ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Until {
    /// When so large a share of the test images is read rightly.
    Accuracy(f64),
    /// When the test loss is so small.
    Loss(f64),
    /// After so much virtual time.
    Time(Duration),
    /// After so many steps of each rank.
    Steps(u64),
}

impl FromStr for Until {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number =
            |text: &str| text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
        let until = text.split_once('=').and_then(|(what, value)| match what {
            "accuracy" => number(value).filter(|share| *share <= 1.0).map(Self::Accuracy),
            "loss" => number(value).map(Self::Loss),
            "time" => duration(value).filter(|time| !time.is_zero()).map(Self::Time),
            "steps" => value.parse().ok().filter(|steps| *steps > 0).map(Self::Steps),
            _ => None,
        });
        until.ok_or_else(|| "give accuracy=F from 0 to 1, loss=F, time=D as 20s, or steps=K".to_owned())
    }
}

/// Values of a key of schemes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) key: String,
    pub(crate) values: Vec<String>,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sweep = text.split_once('=').map(|(key, list)| Self {
            key: key.to_owned(),
            values: list.split(',').map(str::to_owned).collect(),
        });
        sweep
            .filter(|sweep| sweep.values.iter().all(|value| !value.is_empty()))
            .ok_or_else(|| "give KEY=VALUE,VALUE as staleness=0,1,3".to_owned())
    }
}

impl Sweep {
    /// A scheme with each of the values.
    pub(crate) fn of(&self, scheme: &Scheme) -> Result<Vec<Scheme>, SchemeTextError> {
        let text = scheme.to_string();
        let separator = if text.contains(':') { ',' } else { ':' };
        let with = |value: &String| format!("{text}{separator}{}={value}", self.key).parse();
        self.values.iter().map(with).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_and_wrong_ones_refused() {
        assert_eq!("accuracy=0.9".parse(), Ok(Until::Accuracy(0.9)));
        assert_eq!("loss=0.25".parse(), Ok(Until::Loss(0.25)));
        assert_eq!("time=1.5s".parse(), Ok(Until::Time(Duration::from_millis(1500))));
        assert_eq!("steps=40".parse(), Ok(Until::Steps(40)));
        for text in ["accuracy=1.5", "loss=0", "loss=nan", "time=5", "steps=0", "forever", "step=4"] {
            assert!(text.parse::<Until>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_sweep_is_a_scheme_for_each_value_and_names_keys_that_there_are_not() {
        let schemes = |scheme: &str, sweep: &str| {
            let (scheme, sweep): (Scheme, Sweep) =
                (scheme.parse().expect("is a scheme"), sweep.parse().expect("is a sweep"));
            let schemes = sweep.of(&scheme)?;
            Ok::<_, SchemeTextError>(schemes.iter().map(Scheme::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            schemes("ssp", "staleness=0,3,10"),
            Ok(["ssp:staleness=0", "ssp", "ssp:staleness=10"].map(String::from).to_vec())
        );
        assert_eq!(schemes("easgd:mode=sync", "every=2").expect("is one"), ["easgd:every=2,mode=sync"]);
        let error = schemes("ssp", "stalenes=1").expect_err("is no key").to_string();
        assert!(error.contains("did you mean 'staleness'?"), "{error}");
        for text in ["staleness", "staleness=", "staleness=1,,2"] {
            assert!(text.parse::<Sweep>().is_err(), "{text}");
        }
    }
}
