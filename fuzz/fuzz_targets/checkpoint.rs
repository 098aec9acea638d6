//! Whatever bytes a checkpoint has: no panic, and no more memory than they are long. A rank that is
//! read has the same bytes again, and a scheme takes a state over or refuses it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_training::checkpoint::{Manifest, RankState};
use pleach_training::simulation::{Computing, Settings, Simulation};
use pleach_training::{Layout, Learner, Scheme};

const PARAMETERS: usize = 3;

struct Model;

impl Learner for Model {
    fn layout(&self) -> Layout {
        Layout::of(&[PARAMETERS])
    }

    fn initial(&self) -> Vec<f32> {
        vec![0.0; PARAMETERS]
    }

    fn gradient(&self, _: u32, _: u64, _: &[f32], _: &mut [f32]) -> f32 {
        0.0
    }
}

/// The vectors of all schemes.
const VECTORS: [&str; 8] =
    ["parameters", "anchor", "delta", "velocity", "centre", "fetched elements", "sum", "optimizer"];

fuzz_target!(|bytes: &[u8]| {
    let _ = Manifest::decode(bytes);
    if let Ok(rank) = RankState::decode(bytes) {
        let file = rank.encode().expect("is as short");
        let again = RankState::decode(&file).expect("is a file");
        assert_eq!(again.encode().expect("is as short"), file);
    }
    let mut rank = RankState::new(bytes.to_vec());
    VECTORS.iter().for_each(|name| rank.insert(name, &[0.0; PARAMETERS]));
    let settings = Settings {
        ranks: 2,
        steps: 1,
        seed: 0,
        computing: Computing::default(),
        learning_rate: 0.1,
        momentum: 0.0,
        observed_every: 1,
    };
    for scheme in Scheme::ALL {
        let _ = Simulation::restored(&Model, &scheme, &settings, &[rank.clone(), rank.clone()]).map(drop);
    }
});
