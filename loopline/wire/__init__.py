"""How records travel: protobuf conversion, channels and servers. What a record means is in `loopline.messages`."""
