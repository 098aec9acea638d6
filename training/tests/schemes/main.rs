//! Training schemes: what each guarantees, simulated and on real ranks; and mutants of policies
//! that the drivers must catch.

mod bounded;
mod checkpoints;
mod elastic;
mod gossip;
mod hybrid;
mod in_session;
mod invariants;
mod lent;
mod means;
#[path = "../../../collectives/tests/ranks/meeting.rs"]
mod meeting;
mod members;
mod model;
mod mutants;
mod order;
mod own_policy;
mod processes;
#[path = "../quadratic/mod.rs"]
mod quadratic;
#[path = "../../../collectives/tests/ranks/mod.rs"]
mod ranks;
mod real;
mod replay;
mod resume;
mod rounds;
mod rows;
mod slow_rank;
mod streaming;
mod superstep;
mod swarm;
mod taxonomy;
mod virtual_time;
mod words;
