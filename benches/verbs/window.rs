//! Reads of a window over verbs, by two processes that are ranks of a group.

use pleach::transport::clock::now;
use pleach::window::Word;
use pleach::{Fabric, FabricChoice, Group, Options};

use crate::end::WARMUP;
use crate::report::median;

/// Reads what rank 1 has published so often, if this is rank 0, and says the median in
/// microseconds. Variables say which rank this is, as of every group.
pub(crate) fn run(bytes: usize, reads: u64) -> Result<(), String> {
    let told = |error: pleach::CollectiveError| error.to_string();
    let mut options = Options::from_env().map_err(|error| error.to_string())?;
    options.fabric = FabricChoice::Only(Fabric::Verbs);
    let group = Group::join(&options).map_err(|error| error.to_string())?;
    let mut window = group.window::<u8>(bytes, 1).map_err(|error| error.to_string())?;
    window.publish(&vec![group.rank() as u8 + 1; bytes], Word::EMPTY).map_err(told)?;
    group.barrier().map_err(told)?;
    if group.rank() == 0 {
        // Other memory is registered anew for each read.
        let mut into = group.buffer::<u8>(bytes).map_err(told)?;
        let mut times = Vec::with_capacity(reads as usize);
        for read in 0..reads + WARMUP {
            let began = now();
            window.read(1, 0..bytes, &mut into).map_err(told)?;
            if read >= WARMUP {
                times.push(now().since(began).as_secs_f64() * 1e6);
            }
        }
        if into.iter().any(|byte| *byte != 2) {
            return Err("wrong bytes".to_owned());
        }
        println!("{}", median(times));
    }
    group.barrier().map_err(told)?;
    window.close().map_err(told)?;
    group.close().map_err(told)
}
