//! The code of docs/quickstart.md, run: overlap, subgroups, messages, errors.
//!
//! `pleach run -n 4 -- cargo run --release --example quickstart`

use std::time::Duration;

use pleach::{CollectiveError, Group, Operation, Options, ReduceOp};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let group = Group::join(&Options::from_env()?)?;
    overlap(&group)?;
    subgroups(&group)?;
    messages(&group)?;
    errors(group)
}

fn overlap(group: &Group) -> Result<(), Failure> {
    // Three buckets of gradients, each given away as soon as it is computed.
    let mut pending = Vec::new();
    for bucket in 0..3 {
        let gradients = compute(bucket);
        pending.push(group.start(Operation::all_reduce(gradients, ReduceOp::Avg))?);
    }
    // The transfers go on while this thread computes something else.
    for bucket in pending {
        let gradients = bucket.wait()?; // the memory comes back
        assert_eq!(gradients.len(), 1 << 16);
    }
    Ok(())
}

fn subgroups(group: &Group) -> Result<(), Failure> {
    // Even and odd ranks; the key orders them. `None` as colour: in no subgroup.
    let half = group.split(Some(group.rank() % 2), group.rank())?.expect("this rank has a colour");
    let mut data = [1.0f32; 8];
    half.all_reduce(&mut data, ReduceOp::Sum)?;
    assert_eq!(data[0], half.world_size() as f32);
    half.close()?;
    Ok(())
}

fn messages(group: &Group) -> Result<(), Failure> {
    // Each rank sends to the next. A blocking send may wait for its receive, so in a cycle it is
    // started.
    let (rank, ranks) = (group.rank(), group.world_size());
    let sent = group.start(Operation::send(vec![rank; 4], (rank + 1) % ranks))?;
    let mut received = [0u32; 4];
    group.recv(&mut received, (rank + ranks - 1) % ranks)?;
    sent.wait()?;
    assert_eq!(received, [(rank + ranks - 1) % ranks; 4]);
    Ok(())
}

fn errors(group: Group) -> Result<(), Failure> {
    // Rank 0 makes one barrier more than the others, who leave. A rank that is still in the first
    // barrier when rank 0 sees it is told the same.
    let mut outcome = group.barrier();
    if group.rank() == 0 && outcome.is_ok() {
        let impatient = group.within(Duration::from_millis(200)); // each call's own deadline
        outcome = impatient.barrier();
    }
    match outcome {
        Err(CollectiveError::Failed(fault)) => println!("rank {}: {fault}", group.rank()),
        other => other?,
    }
    Ok(())
}

/// What a training step would compute.
fn compute(bucket: usize) -> Vec<f32> {
    vec![bucket as f32; 1 << 16]
}
